"""Source text of the flat-argument reference, see `_flat.py`. `#@ name` marks where a feature adds lines."""

from __future__ import annotations

_MODEL_HEAD = '''"""A language model."""

from dataclasses import dataclass

from torch import nn

from .layers import Attention, FeedForward
#@ imports
'''
_OWN_ARGS = """

@dataclass
class <title>Args:
    vocab_size: int = <vocabulary>
    dim: int = <dim>
    n_layers: int = <layers>
    n_heads: int = <heads>
    n_kv_heads: int = <kv_heads>
    head_dim: int = <head_dim>
    hidden_dim: int = <hidden_dim>
    rope_theta: float = <theta>
    window: int | None = <window>
    #@ args
"""
_DERIVED_ARGS = """from .args import ModelArgs


@dataclass
class <title>Args(ModelArgs):
    vocab_size: int = <vocabulary>
    dim: int = <dim>
    n_layers: int = <layers>
    n_heads: int = <heads>
    n_kv_heads: int = <kv_heads>
    head_dim: int = <head_dim>
    hidden_dim: int = <hidden_dim>
    rope_theta: float = <theta>
    window: int | None = <window>
"""
_BLOCK_OBJECT = """

class <title>Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        #@ feed_forward
        #@ norms
"""
_BLOCK_KEYWORDS = """

class <title>Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(
            dim=args.dim,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            head_dim=args.head_dim,
            rope_theta=args.rope_theta,
            window=args.window,
            #@ pass
        )
        #@ feed_forward
        #@ norms
"""
_MODEL_TAIL = """
    def forward(self, x):
        #@ forward


class <title>(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(<title>Block(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        #@ head

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        #@ scores
"""
MODEL = {
    "keywords": _MODEL_HEAD + _OWN_ARGS + _BLOCK_KEYWORDS + _MODEL_TAIL,
    "own-args": _MODEL_HEAD + _OWN_ARGS + _BLOCK_OBJECT + _MODEL_TAIL,
    "shared-args": _MODEL_HEAD + _DERIVED_ARGS + _BLOCK_OBJECT + _MODEL_TAIL,
}
_WIDTHS = "args.dim, args.hidden_dim"
_DENSE = f"FeedForward({_WIDTHS})"
_MIXED = f"MixtureOfExperts({_WIDTHS}, args.num_experts, args.experts_per_token)"
_DENSE_OBJECT = "self.feed_forward = FeedForward(args)"
_MIXED_OBJECT = "self.feed_forward = (MixtureOfExperts if args.num_experts else FeedForward)(args)"
FEED_FORWARD = {
    "keywords": (f"self.feed_forward = {_DENSE}", f"self.feed_forward = {_MIXED} if args.num_experts else {_DENSE}"),
    "own-args": (_DENSE_OBJECT, _MIXED_OBJECT),
    "shared-args": (_DENSE_OBJECT, _MIXED_OBJECT),
}

SHARED_ARGS = """from dataclasses import dataclass


@dataclass
class ModelArgs:
    vocab_size: int = 64
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 8
    hidden_dim: int = 48
    rope_theta: float = 10000.0
    window: int | None = None
    #@ args
"""

_LAYERS_HEAD = '''"""Layers that all models share."""

import torch
from torch import nn
from torch.nn import functional as F

#@ imports

def turn(x, positions, freqs):
    angles = positions[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
'''
_LAYERS_TAIL = """
    def encode(self, x):
        positions = torch.arange(x.shape[-2], device=x.device).float()
        freqs = 1.0 / (self.rope_theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        #@ dispatch
        return turn(x, positions, freqs)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            mask = mask & ~mask.tril(-self.window)
        y = F.scaled_dot_product_attention(self.encode(q), self.encode(k), v, attn_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))
"""
_LAYERS_KEYWORDS_INIT = """    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        window: int | None,
        #@ parameters
    ):
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.window = window
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        #@ keep
        #@ init
"""
_LAYERS_OBJECT_INIT = """    def __init__(self, args):
        super().__init__()
        self.args = args
        self.head_dim = args.head_dim
        self.rope_theta = args.rope_theta
        self.window = args.window
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        #@ init
"""
_FEED_FORWARD_FORWARD = """
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
"""
_FEED_FORWARD_KEYWORDS = """

class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
"""
_FEED_FORWARD_OBJECT = """

class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)
"""
LAYERS_KEYWORDS = _LAYERS_HEAD + _LAYERS_KEYWORDS_INIT + _LAYERS_TAIL + _FEED_FORWARD_KEYWORDS + _FEED_FORWARD_FORWARD
LAYERS_OBJECT = _LAYERS_HEAD + _LAYERS_OBJECT_INIT + _LAYERS_TAIL + _FEED_FORWARD_OBJECT + _FEED_FORWARD_FORWARD

# New layer code, in files of its own: not counted on either side.
ENCODINGS = '''"""Position encodings."""

import torch
from torch import nn


def truncated(freqs, keep):
    return freqs * (torch.arange(len(freqs)) < keep * len(freqs))


def neighbours(x, positions, freqs):
    angles = positions[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def grouped(positions, group):
    return positions // group


def logarithmic(positions, stretch):
    return positions.log1p() * stretch


def randomized(positions, span):
    draw = torch.randperm(span, generator=torch.Generator().manual_seed(0))
    return draw[: len(positions)].sort().values.float()


def axial(x, positions, freqs, width):
    odd = torch.arange(len(freqs)) % 2 == 1
    angles = torch.where(odd, (positions % width)[:, None], (positions // width)[:, None]) * freqs
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinusoidal(x, positions, freqs):
    angles = positions[:, None] * freqs
    return x + torch.cat([angles.sin(), angles.cos()], dim=-1)


def table(length, dim):
    return nn.Parameter(torch.randn(length, dim) * 0.02)


def learned(x, weights):
    return x + weights[: x.shape[-2]]
'''
MOE = '''"""A mixture of experts; takes an argument object or the numbers themselves."""

import torch
from torch import nn
from torch.nn import functional as F


class MixtureOfExperts(nn.Module):
    def __init__(self, args, hidden_dim=None, num_experts=None, experts_per_token=None):
        super().__init__()
        dim = args if hidden_dim else args.dim
        hidden_dim = hidden_dim or args.hidden_dim
        experts = num_experts or args.num_experts
        self.k = experts_per_token or args.experts_per_token
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, hidden_dim, dim) * 0.02)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden_dim) * 0.02)
        self.w3 = nn.Parameter(torch.randn(experts, hidden_dim, dim) * 0.02)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k, dim=-1)
        gates = torch.zeros(*x.shape[:-1], len(self.w1)).scatter(-1, chosen, weights)
        hidden = F.silu(torch.einsum("btd,ehd->bteh", x, self.w1)) * torch.einsum("btd,ehd->bteh", x, self.w3)
        return torch.einsum("bteh,edh,bte->btd", hidden, self.w2, gates)
'''

"""How sure the model was: log-probabilities of its tokens and of the likeliest others."""

import math

import orchard
from orchard import fm

model = orchard.load("smollm2")
session = orchard.Session(model=model)
options = fm.GenerationOptions(logprobs=2, maximum_response_tokens=8)
answer = session.respond("What is the capital of France?", options=options)
for token in answer.logprobs or ():
    others = ", ".join(f"{model.tokenizer.decode([id])!r} {math.exp(value):.0%}" for id, value in token.top)
    print(f"{model.tokenizer.decode([token.id])!r:12} {math.exp(token.logprob):.0%}   of: {others}")

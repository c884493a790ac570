"""A training sample is what inference reads, id by id, with targets on what the model has to write and on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.data import BadSample, Sample, UnstableTemplate, conversation
from orchard.text import Tokenizer, chat_ids
from orchard.weights.gguf.reader import GGUFFile
from tests.data.data_tools import KINDS, TEMPLATES, tokenizer_for

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}},
]
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}}
PLAIN = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris. <|im_end|> 日本語"},
    {"role": "user", "content": " And again? "},
    {"role": "assistant", "content": "Paris,\n\n  still."},
]
WITH_TOOLS = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"},
    {"role": "assistant", "content": "It is 3."},
]
ENDS = {"zephyr": "<|im_end|>", "mistral": None, "mistral-tools": None, "gemma": "<end_of_turn>"}
ENDS |= {"gemma-system": "<end_of_turn>", "llama3": "<|eot_id|>", "llama3-tools": "<|eot_id|>"}


def answers(sample: Sample) -> list[tuple[int, list[int]]]:
    """The stretches that are learnt: where each begins, and its ids."""
    found: list[tuple[int, list[int]]] = []
    for place, (token, learnt) in enumerate(zip(sample.ids.tolist(), sample.learnt.tolist())):
        if learnt and found and found[-1][0] + len(found[-1][1]) == place:
            found[-1][1].append(token)
        elif learnt:
            found.append((place, [token]))
    return found


def check(tokenizer: Tokenizer, messages: list[dict[str, Any]], turns: str = "all", **options: Any) -> Sample:
    """Every stretch that is learnt follows exactly what `chat_ids` gives for the messages before it, and ends its turn."""
    sample = conversation(tokenizer, messages, turns=turns, **options)
    ids = sample.ids.tolist()
    wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = wanted[-1:] if turns == "last" else wanted
    found = answers(sample)
    assert len(found) == len(wanted)
    for index, (start, answer) in zip(wanted, found):
        assert ids[:start] == chat_ids(tokenizer, messages[:index], add_generation_prompt=True, **options)
        whole = chat_ids(tokenizer, messages[: index + 1], add_generation_prompt=False, **options)
        spelled = tokenizer.decode(whole, skip_special=False)
        so_far = tokenizer.decode(ids[: start + len(answer)], skip_special=False)
        assert spelled.startswith(so_far) and not spelled[len(so_far) :].strip()
        assert answer[-1] in tokenizer.control_ids
    assert len(ids) == found[-1][0] + len(found[-1][1])  # nothing after the last answer's end
    return sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", [style for style in TEMPLATES if style != "thinking"])
def test_every_answer_follows_what_inference_reads(style: str, kind: str) -> None:
    tokenizer = tokenizer_for(style, kind)
    sample = check(tokenizer, PLAIN)
    end = ENDS.get(style, "<|im_end|>") or tokenizer.eos_token
    if style == "zephyr":
        end = tokenizer.eos_token
    for _, answer in answers(sample):
        assert answer[-1] == tokenizer.control_tokens[end]
        assert not tokenizer.control_ids.intersection(answer[:-1])  # what was typed stays text
    check(tokenizer, PLAIN, turns="last")
    check(tokenizer, PLAIN[1:3])


@pytest.mark.parametrize("style", ["qwen-tools", "llama3-tools"])
def test_tools_and_their_calls_are_learnt_as_the_template_writes_them(style: str) -> None:
    tokenizer = tokenizer_for(style)
    sample = check(tokenizer, WITH_TOOLS, tools=TOOLS)
    (_, call), (_, answer) = answers(sample)
    said = tokenizer.decode(call)
    assert '"name": "add"' in said and '"a"' in said and "tool_response" not in said
    assert tokenizer.decode(answer).strip() == "It is 3."
    shown = tokenizer.decode(sample.ids.tolist())
    assert '"description": "adds"' in shown  # the tools are read
    assert conversation(tokenizer, WITH_TOOLS).ids.tolist() != sample.ids.tolist()


def test_tools_that_move_to_the_last_question_are_refused_for_all_turns_and_exact_for_the_last() -> None:
    """Mistral's template writes the tools before the last question only, so earlier turns change as a talk goes on."""
    tokenizer = tokenizer_for("mistral-tools")
    check(tokenizer, WITH_TOOLS, tools=TOOLS)
    more = [*WITH_TOOLS, {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
    with pytest.raises(UnstableTemplate, match="message 5") as caught:
        conversation(tokenizer, more, tools=TOOLS, place="a.jsonl:7")
    assert caught.value.message.startswith("a.jsonl:7: ") and "turns='last'" in caught.value.hint
    check(tokenizer, more, turns="last", tools=TOOLS)
    check(tokenizer, more)


def test_a_template_that_takes_thoughts_out_of_earlier_turns_is_refused_unless_there_are_none() -> None:
    tokenizer = tokenizer_for("thinking")
    thought = "<think>\nhm\n</think>\n\nyes"
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nno"},
    ]
    with pytest.raises(
        UnstableTemplate, match=r"message 3: the template writes the turns before it differently"
    ) as caught:
        conversation(tokenizer, talk)
    assert "think" in caught.value.message and caught.value.code == "unstable-template"
    check(tokenizer, talk, turns="last")
    check(tokenizer, PLAIN)


def test_a_template_that_strips_what_it_wrote_is_refused() -> None:
    template = (
        "{% for m in messages %}<|user|>{{ m.content if loop.last and m.role == 'assistant' else m.content | trim }}"
    )
    tokenizer = tokenizer_for(template + "<|end|>{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}")
    with pytest.raises(UnstableTemplate, match="message 3: the template writes the turns before it differently"):
        conversation(tokenizer, [{"role": r, "content": " x "} for r in ("user", "assistant") * 2])


def test_a_template_whose_answer_does_not_follow_its_own_prompt_is_refused() -> None:
    template = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    tokenizer = tokenizer_for(template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    with pytest.raises(UnstableTemplate, match="message 1: the template does not write it behind"):
        conversation(tokenizer, PLAIN[1:3])


@pytest.mark.parametrize("style", ["chatml", "gemma-system", "zephyr"])
def test_an_answer_whose_beginning_grows_together_with_the_prompt_is_encoded_by_itself(style: str) -> None:
    r"""ChatML prompts end with \n. An answer that begins with \n would make one token of both, and inference never reads it."""
    tokenizer = tokenizer_for(style)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\n  spaces"}]
    sample = conversation(tokenizer, messages)
    prompt = chat_ids(tokenizer, messages[:1])
    assert sample.ids.tolist()[: len(prompt)] == prompt
    assert not sample.learnt[: len(prompt)].any() and sample.learnt[len(prompt) :].all()
    whole = chat_ids(tokenizer, messages, add_generation_prompt=False)
    assert tokenizer.decode(whole, skip_special=False).startswith(
        tokenizer.decode(sample.ids.tolist(), skip_special=False)
    )


def test_an_answer_that_cannot_be_encoded_by_itself_is_refused() -> None:
    """SentencePiece would put a space before it that is not there."""
    tokenizer = tokenizer_for("chatml", "pieces")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\nthe"}]
    with pytest.raises(UnstableTemplate, match="message 1: the template joins it to its generation prompt"):
        conversation(tokenizer, messages)


def test_without_a_template_the_last_answer_ends_with_the_end_token() -> None:
    tokenizer = tokenizer_for(None)
    sample = conversation(tokenizer, PLAIN, turns="last")
    prompt = chat_ids(tokenizer, PLAIN[:-1])
    assert sample.ids.tolist()[: len(prompt)] == prompt
    assert tokenizer.decode(sample.ids.tolist()[len(prompt) :], skip_special=False) == " Paris,\n\n  still.<|im_end|>"
    with pytest.raises(UnstableTemplate, match="no token that ends the turn"):
        conversation(tokenizer, PLAIN)


def test_variables_reach_the_template() -> None:
    template = "{% for m in messages %}<|user|>{{ mood }}{{ m.content }}<|end|>{% endfor %}"
    tokenizer = tokenizer_for(template + "{% if add_generation_prompt %}<|user|>{{ mood }}{% endif %}")
    sample = check(tokenizer, PLAIN[1:3], variables={"mood": "kind"})
    assert tokenizer.decode(sample.ids.tolist()).startswith("kind")


def test_conversations_without_an_answer_or_a_question_are_bad_samples() -> None:
    for messages, reason in ((PLAIN[:2], "no-answer"), (PLAIN[2:3], "roles")):
        with pytest.raises(BadSample) as caught:
            conversation(tokenizer_for(), messages, place="here:1")
        assert caught.value.reason == reason and caught.value.message.startswith("here:1: ")


@pytest.mark.parametrize("style", ["chatml", "llama3-tools", "gemma-system", "qwen-tools", "mistral"])
@settings(max_examples=40)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_any_conversation_is_exact_or_refused(style: str, texts: list[str]) -> None:
    tokenizer = tokenizer_for(style)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    last = conversation(tokenizer, messages, turns="last")
    prompt = chat_ids(tokenizer, messages[:-1])
    assert last.ids.tolist()[: len(prompt)] == prompt and last.learnt[len(prompt) :].all()
    try:
        sample = conversation(tokenizer, messages)
    except UnstableTemplate:
        # Only where an answer's beginning would grow together with its prompt.
        assert any(text[0] in "\n\r\t " or text[0].isspace() for text in texts[1:-1:2])
        return
    for (start, _), index in zip(answers(sample), range(1, len(texts), 2)):
        assert sample.ids.tolist()[:start] == chat_ids(tokenizer, messages[:index])


@pytest.mark.real
def test_the_default_model_s_own_template(smollm2: Path) -> None:
    with GGUFFile.open(smollm2) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    sample = check(tokenizer, PLAIN)
    assert [answer[-1] in tokenizer.eos_ids for _, answer in answers(sample)] == [True, True]

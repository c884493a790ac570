"""Hooks watch a conversation and decide about single tool calls: approve, edit or reject. The turn goes on."""

import orchard
from orchard.session.hooks import Hooks, approve, edit, reject
from orchard.session.turn import Call
from orchard.testing import ScriptedModel, ToolCall

sent: list[str] = []


def send(address: str) -> str:
    """Send a letter."""
    sent.append(address)
    return "sent"


def decide(call: Call):
    if "everyone" in call.arguments:
        return reject("letters to everyone are not allowed")
    return edit({"address": "Office, 2nd floor"}) if "office" in call.arguments else approve()


calls = [ToolCall("send", {"address": where}) for where in ("everyone", "office", "Ada")]
model = ScriptedModel([*calls, "Two letters are on their way."])
session = orchard.Session(model=model, tools=[send], hooks=Hooks(on_tool_call=decide))
answer = session.respond("Send the letters.")
print(answer.content, sent)
print("not allowed:", [str(error) for error in answer.tool_errors])
assert sent == ["Office, 2nd floor", "Ada"]

"""Conversations with tools by the stock libraries, one class for each wire: ``ask`` sends the history and adds the
answer to it as the library returned it, ``reply`` answers its tool calls."""

from __future__ import annotations

import json

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
NAMES = ("add", "look_up")


def loose(value):
    """The same arguments as another client writes them."""
    try:
        return json.dumps(json.loads(value), indent=2, sort_keys=True)
    except ValueError:  # cut off by the limit of tokens
        return value


class Chat:
    path = "/v1/chat/completions"

    def __init__(self, access, **options):
        import openai

        self.client = openai.OpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0, **options)
        self.messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
        self.tools = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in NAMES]
        self.calls = []

    def ask(self, stream=False, **keys):
        keys = {"model": "policy", "messages": self.messages, "tools": self.tools, "max_tokens": 600} | keys
        if not stream:
            message = self.client.chat.completions.create(**keys).choices[0].message
            text, calls = (
                message.content,
                [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()],
            )
        else:
            text, found = "", {}
            for chunk in self.client.chat.completions.create(stream=True, **keys):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for part in choice.delta.tool_calls or ():
                        at = found.setdefault(part.index, ["", "", ""])
                        at[0], at[1] = part.id or at[0], part.function.name or at[1]
                        at[2] += part.function.arguments or ""
            calls = [tuple(found[index]) for index in sorted(found)]
        self.calls = calls
        answer = {"role": "assistant", "content": text}
        if calls:
            answer["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": loose(a)}} for i, n, a in calls
            ]
        self.messages.append(answer)
        return text, [(name, json.loads(loose(arguments) or "null")) for _, name, arguments in calls]

    def reply(self, text):
        for call, *_ in self.calls:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": f"{text} of {call[-1:]}"})
        if not self.calls:
            self.messages.append({"role": "user", "content": text})


class Messages:
    path = "/v1/messages"

    def __init__(self, access, **options):
        import anthropic

        self.client = anthropic.Anthropic(base_url=access.url, api_key=access.key, max_retries=0, **options)
        self.messages = [{"role": "user", "content": "What is 3 + 4?"}]
        self.tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
        self.blocks = []

    def ask(self, stream=False, **keys):
        keys = {
            "model": "policy", "max_tokens": 600, "system": "Be brief.", "messages": self.messages, "tools": self.tools
        } | keys  # fmt: skip
        if stream:
            with self.client.messages.stream(**keys) as events:
                blocks = events.get_final_message().content
        else:
            blocks = self.client.messages.create(**keys).content
        self.blocks = [block for block in blocks if block.type == "tool_use"]
        self.messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in blocks]}
        )
        return "".join(b.text for b in blocks if b.type == "text"), [(b.name, b.input) for b in self.blocks]

    def reply(self, text):
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": f"{text} of {b.name}"} for b in self.blocks]
        self.messages.append({"role": "user", "content": results or text})


class Responses:
    path = "/v1/responses"

    def __init__(self, access, **options):
        import openai

        self.client = openai.OpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0, **options)
        self.items = [{"role": "user", "content": "What is 3 + 4?"}]
        self.tools = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in NAMES]
        self.calls = []

    def ask(self, stream=False, **keys):
        keys = {
            "model": "policy", "instructions": "Be brief.", "input": self.items, "tools": self.tools,
            "max_output_tokens": 600, "store": False,
        } | keys  # fmt: skip
        if stream:
            with self.client.responses.stream(**{k: v for k, v in keys.items()}) as events:
                response = events.get_final_response()
        else:
            response = self.client.responses.create(**keys)
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        self.calls = [item for item in items if item["type"] == "function_call"]
        self.items += items
        return response.output_text, [(item["name"], json.loads(item["arguments"])) for item in self.calls]

    def reply(self, text):
        for call in self.calls:
            self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})
        if not self.calls:
            self.items.append({"role": "user", "content": text})


class Completions:
    path = "/v1/completions"

    def __init__(self, access, **options):
        import openai

        self.client = openai.OpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0, **options)
        self.prompt = "What is 3 + 4? "

    def ask(self, stream=False, **keys):
        keys = {"model": "policy", "prompt": self.prompt, "max_tokens": 600} | keys
        if stream:
            text = "".join(c.choices[0].text for c in self.client.completions.create(stream=True, **keys) if c.choices)
        else:
            text = self.client.completions.create(**keys).choices[0].text
        self.prompt += text
        return text, []

    def reply(self, text):
        self.prompt += f" {text} "


WIRES = {"chat": Chat, "messages": Messages, "responses": Responses, "completions": Completions}

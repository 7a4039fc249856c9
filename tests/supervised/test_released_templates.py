"""What is trained with the templates of released models, against other projects' maskers and a record."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.supervised import released_templates as released
from tests.supervised.released_templates import CONVERSATIONS, RELEASED, TOOLS

RECORD = Path(__file__).resolve().parents[1] / "data/trained_answers.json"
"""Family → conversation → the trained text of each answer, or the error. ``docs/answers.md`` is made of it."""
needs_packages = pytest.mark.skipif(
    not (released.FOLDER / "installed.txt").is_file(),
    reason="the templates are not installed: launch/requirements/templates.sh",
)


class Family:
    """A template with what renders and masks it."""

    def __init__(self, name):
        from skyrl_megatron.rollout.templates import ChatFormat

        self.released = RELEASED[name]
        self.tokenizer = released.tokenizer_of(self.released)
        self.stops = self.tokenizer.convert_tokens_to_ids(list(self.released.stops))
        self.chat = ChatFormat(self.tokenizer, kwargs=self.released.kwargs, stop_token_ids=self.stops)

    def text(self, messages, **more):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self.released.kwargs, **more)

    def runs(self, ids, mask):
        """The text of each run of ids that the mask has."""
        runs, current = [], []
        for token, one in [*zip(ids, mask, strict=True), (0, 0)]:
            if one:
                current.append(token)
            elif current:
                runs.append(self.tokenizer.decode(current))
                current = []
        return runs

    def agrees(self, other, ours, prompt):
        """Whether another masker's answer is ours, but for the end of the generation prompt, which it may count as
        sampled, a new line after the stop, and a stop that it leaves out."""
        for stop in self.released.stops:
            if other.rstrip("\n").endswith(stop):
                other = other.rstrip("\n")
        whole = [other + stop for stop in ("", *self.released.stops)]
        return any(text.endswith(ours) and prompt.endswith(text[: len(text) - len(ours)]) for text in whole)


def tools_of(messages):
    return TOOLS if any(message.get("tool_calls") for message in messages) else None


def trained(family, messages):
    """[(answer's number, sequence of it, trained text)], or the error."""
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_supervised.trained_answers import trained_sequences

    try:
        sequences = trained_sequences(family.chat, messages, tools=tools_of(messages))
    except DataError as error:
        return str(error)
    return [(ids, text) for ids in sequences for text in family.runs([*ids[0], *ids[1]], [0] * len(ids[0]) + ids[2])]


@needs_packages
@pytest.mark.parametrize("name", RELEASED)
def test_what_is_trained_is_what_the_record_says(name):
    """And each answer ends with a stop token, which it has once; its sequence begins with the engine's prompt."""
    family, record = Family(name), json.loads(RECORD.read_text())[name]
    assert list(record) == list(CONVERSATIONS)
    for title, messages in CONVERSATIONS.items():
        answers = trained(family, messages)
        if isinstance(answers, str):
            assert record[title] == {"error": answers}, title
            continue
        assert record[title] == [text for _, text in answers], title
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(answers) == len(numbers)
        for number, ((prompt, response, _), text) in zip(numbers, answers, strict=True):
            before = family.text(messages[:number], add_generation_prompt=True, tools=tools_of(messages))
            whole = family.tokenizer.decode([*prompt, *response])
            assert whole.startswith(before + text), title
            assert [text.count(stop) for stop in family.released.stops].count(1) == 1
            assert text.endswith(family.released.stops), title


@needs_packages
def test_other_maskers_agree():
    """The renderers of another project, where they write the template's text, and TRL's templates with marks."""
    compared, apart = Counter(), []
    for name in RELEASED:
        family = Family(name)
        renderer = released.renderer_of(family.released, family.tokenizer)
        for title, messages in CONVERSATIONS.items():
            answers = trained(family, messages)
            if isinstance(answers, str):
                continue
            tools = tools_of(messages)
            numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            prompts = [family.text(messages[:n], add_generation_prompt=True, tools=tools) for n in numbers]
            others = {"renderers": of_renderers(family, renderer, messages, numbers) if renderer else []}
            others["trl"] = of_trl(family, messages, numbers)
            for masker, texts in others.items():
                for place, (other, (_, ours), prompt) in enumerate(zip(texts, answers, prompts, strict=bool(texts))):
                    if other is None:
                        continue
                    compared[masker, name] += 1
                    if not family.agrees(other, ours, prompt):
                        apart.append((masker, name, title, place))
    # GLM-4.5's new line after <|assistant|> is sampled: its generation prompt ends before it. renderers leaves it out.
    assert not [row for row in apart if row[:2] != ("renderers", "glm-4.5")]
    assert sum(compared.values()) > 200 and len({name for _, name in compared}) >= 9, compared


def of_renderers(family, renderer, messages, numbers):
    """The sampled text of each answer after the messages before it; None where the template writes another text."""
    texts = []
    for number in numbers:
        upto = messages[: number + 1]
        rendered = renderer.render(upto, tools=tools_of(messages))
        if family.tokenizer.decode(rendered.token_ids) != family.text(upto, tools=tools_of(messages)):
            texts.append(None)
            continue
        owned = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        texts.append(
            family.tokenizer.decode([token for token, owner, sampled in owned if sampled and owner == number])
        )
    return texts


def of_trl(family, messages, numbers):
    """The marked text of each answer, as the last of its conversation."""
    if not family.released.training:
        return []
    template = (released.TRL / f"{family.released.training}.jinja").read_text()
    texts = []
    for number in numbers:
        marked = family.tokenizer.apply_chat_template(
            messages[: number + 1],
            chat_template=template,
            tools=tools_of(messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        runs = family.runs(marked["input_ids"], marked["assistant_masks"])
        texts.append(runs[-1] if runs else None)
    return texts


if __name__ == "__main__":  # writes the record: read what changed in it
    texts = {}
    for name in RELEASED:
        family, texts[name] = Family(name), {}
        for title, messages in CONVERSATIONS.items():
            answers = trained(family, messages)
            texts[name][title] = {"error": answers} if isinstance(answers, str) else [text for _, text in answers]
    RECORD.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")

"""Chat templates that multiply what they are given: refused by name before the text exists."""

import pytest

NAMESPACE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}BODY{% endfor %}{{ ns.x }}"
GROWING = {
    "content": "{{ messages[0].content * 100000000 }}",
    "a constant": "{{ 'x' * 10000000000 }}",
    "a list": "{{ [1, 2] * 1000000000 }}",
    "a number": "{{ 10 ** (10 ** 10) }}",
    "centred": "{{ 'x' | center(1000000000) }}",
    "justified": "{{ 'x'.ljust(1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent of a star": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "filter": "{{ '%1000000000d' | format(1) }}",
    "dates": "{{ strftime_now('%1000000000Y') }}",
    "tilde": NAMESPACE.replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"),
    "plus": NAMESPACE.replace("BODY", "{% set ns.x = ns.x + ns.x %}"),
    "block": NAMESPACE.replace("BODY", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxx{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "replaced": "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "joined": "{{ range(100000) | join('b' * 60000) }}",
    "joined by a method": "{{ ('b' * 60000).join(['a'] * 60000) }}",
    "on the way": "{{ range(60000) | map('center', 60000) | list | length }}",
    "indented": "{{ ('a\n' * 30000) | indent(60000) }}",
    "json": "{{ messages | tojson(indent=100000000) }}",
    "assistant": "{% generation %}{{ 'x' * 10000000000 }}{% endgeneration %}",
}
GROWTH = r"the template of generator\.chat_template (multipl|uses|form|has)"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    from tests.support.tiny_models import write_tiny_model

    return AutoTokenizer.from_pretrained(write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("name", GROWING)
def test_a_template_that_grows(tokenizer, name):
    """In a prompt, after an answer and in a whole conversation."""
    import tracemalloc

    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat

    tracemalloc.start()
    try:
        chat = ChatFormat(tokenizer, GROWING[name])
        with pytest.raises(DataError, match=GROWTH):
            chat.prompt(MESSAGES)
        with pytest.raises(DataError, match=r"generator\.chat_template"):
            chat.after_answer([])
        with pytest.raises(DataError, match=r"generator\.chat_template"):
            chat.answers([*MESSAGES, {"role": "assistant", "content": "x"}], 1)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_a_tokenizer_with_a_template_that_grows(tokenizer, tmp_path):
    """The error names the folder, the file and the row."""
    import json

    from skyrl_megatron.data.prompts import PromptDataset
    from skyrl_megatron.errors import DataError

    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": MESSAGES}) + "\n")
    own, tokenizer.chat_template = tokenizer.chat_template, GROWING["content"]
    try:
        with pytest.raises(DataError, match=r"x\.jsonl, row 0.*the chat template of .*model.* multiplies") as error:
            PromptDataset(str(tmp_path / "x.jsonl"), tokenizer, 64)
    finally:
        tokenizer.chat_template = own
    assert tokenizer.name_or_path in str(error.value) and "generator.chat_template" in str(error.value)


ORDINARY = (
    "{{ '%s-%05d' % (messages[0].role, 7) }}{{ 'Today {}, 2024'.format(3) }}"
    "{{ messages[0].content.replace('l', 'LL') }}"
    "{{ ['a', 'b'] | join(', ') }}{{ 1 + 2 * 3 }}{{ 'a' ~ 1 }}{% for i in range(3) %}{{ i }}{% endfor %}"
    "{{ messages | map(attribute='content') | join }}{{ messages[0].content.split('e')[-1].lstrip('l') }}"
    "{{ messages | tojson(indent=1) }}{{ 'x' | indent(2) }}{% generation %}y{% endgeneration %}{{ '-' * 40 }}"
)


@pytest.mark.parametrize("size", [5, 200_000])
def test_ordinary_templates_are_rendered_as_transformers_does(tokenizer, size):
    """Of prompts of any length: how long one may be, trainer.max_prompt_length says."""
    from transformers.utils import chat_template_utils

    from skyrl_megatron.data.tokenizer import render

    messages = [{"role": "user", "content": "hello " * size}, {"role": "assistant", "content": "x"}]
    for text in (ORDINARY, tokenizer.chat_template):
        stock = chat_template_utils._cached_compile_jinja_template(text)
        expected = stock.render(messages=messages, add_generation_prompt=True, tools=None, documents=None)
        assert expected == render(tokenizer, messages, template=text, add_generation_prompt=True, tokenize=False)

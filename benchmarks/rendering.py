"""Conversations as trained tokens: the template's text tokenized once, against its pieces tokenized alone.

    python benchmarks/run.py rendering [--rows 400] [--rounds 5]

Rows of about 640 tokens, of one and of three turns, with a byte-level tokenizer. Ours finds the tokens of each answer
in those of the whole text. The rival is the shortest way to a mask: it renders each prompt and each answer, and
tokenizes these pieces one by one, which is wrong for tokenizers that put a space before a text. Rows a second of
processor time, the fastest rounds of one process, in turn; both give the same tokens here, which is checked.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from smoke import parse

from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron_supervised.trained_answers import trained_sequences

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "the answer is wrong try again plus minus what system user assistant model train token mask".split()


def small_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer, trained on additions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(
        (f"{' '.join(WORDS)} {a} + {b} = {a + b}\n" for a in range(40) for b in range(40)), trainer
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    made.chat_template = TEMPLATE
    return made


def conversations(count: int, turns: int, tokens: int) -> list[list[dict[str, str]]]:
    """Return conversations of about ``tokens`` tokens, a quarter of them in questions."""
    rng = random.Random(0)

    def text(share: float) -> str:
        words = (rng.choice(WORDS) if rng.random() < 0.85 else str(rng.randrange(99)) for _ in range(1000))
        return " ".join(word for _, word in zip(range(round(share * tokens / turns)), words, strict=False))

    return [
        [
            m
            for _ in range(turns)
            for m in ({"role": "user", "content": text(0.22)}, {"role": "assistant", "content": text(0.65)})
        ]
        for _ in range(count)
    ]


def by_pieces(chat: ChatFormat, messages: list[Any]) -> list[list[int]]:
    """Return the tokens of the pieces, and their mask."""
    end = chat.tokenizer.convert_ids_to_tokens(chat.end_token)
    ids: list[int] = []
    mask: list[int] = []
    known = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = chat.text(messages[:place], generation_prompt=True)
            through = chat.text(messages[: place + 1])
            answer, _, rest = through[len(before) :].rpartition(end)
            for piece, trained in ((before[len(known) :], 0), (answer, 1)):
                tokens = chat.tokenizer.encode(piece, add_special_tokens=False)
                ids, mask = [*ids, *tokens], [*mask, *([trained] * len(tokens))]
            ids, mask = [*ids, chat.end_token], [*mask, 1]
            known = through[: len(through) - len(rest)]
    return [ids, mask]


def whole(chat: ChatFormat, messages: list[Any]) -> list[list[int]]:
    """Return the tokens of our one sequence, and their mask."""
    ((prompt, response, mask),) = trained_sequences(chat, messages)
    return [[*prompt, *response], [*([0] * len(prompt)), *mask]]


def fastest(rows: Sequence[Any], rounds: int, *sides: Callable[[Any], Any]) -> list[float]:
    """Return rows a second of each side."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for place, side in enumerate(sides):
            started = time.process_time()
            for row in rows:
                side(row)
            best[place] = min(best[place], time.process_time() - started)
    return [len(rows) / seconds for seconds in best]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=640)
    args = parse(parser, rows=4, rounds=1)
    chat = ChatFormat(small_tokenizer())
    for turns in (1, 3):
        rows = conversations(args.rows, turns, args.tokens)
        for row in rows:
            assert whole(chat, row) == by_pieces(chat, row)
        tokens = sum(len(whole(chat, row)[0]) for row in rows) / len(rows)
        ours, rival = fastest(rows, args.rounds, lambda row: whole(chat, row), lambda row: by_pieces(chat, row))
        print(
            f"{turns} turns, {tokens:.0f} tokens: {ours:,.0f} rows/s; pieces {rival:,.0f} rows/s: {ours / rival:.2f}x"
        )


if __name__ == "__main__":
    main()

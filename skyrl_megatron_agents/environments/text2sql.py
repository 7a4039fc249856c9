"""Text-to-SQL (SkyRL-SQL): the policy explores a SQLite database and submits one query.

The policy thinks in ``<think>…</think>``, writes ``<sql>…</sql>`` to query the database and ``<solution>…</solution>``
to submit. Both of the latter end tags must be stop strings (``generator.sampling_params.stop``).
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    ToolGroup,
    answer_text,
    check_end_tags,
    require_ground_truth,
    tool,
)

_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_INNER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_AFTER_OBSERVATION = re.compile(r"</observation>\s*(\S{0,7})", re.IGNORECASE)
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
"""The row's ``data`` → folder of databases in ``db_path``."""
EXPLORE_TIMEOUT_S, GRADE_TIMEOUT_S = 5.0, 30.0
MAX_ROWS, MAX_VALUE_BYTES = 100_000, 10_000_000
MAX_CHARACTERS, FIRST_ROWS = 9_000, 50


class QueryFailed(RuntimeError):
    """SQLite refused the query, or it took too long. The message is for the policy."""


def run_query(database: Path, query: str, timeout_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one statement on a read-only connection to a database; return (column names, rows).

    Raises QueryFailed for SQL errors, writes, attempts to attach other files, more than ``MAX_ROWS`` rows, and after
    ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=timeout_s)
    try:
        connection.set_authorizer(_read_only)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        cursor = connection.execute(query)
        rows = cursor.fetchmany(MAX_ROWS + 1)
        names = [column[0] for column in cursor.description or ()]
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        if time.monotonic() > deadline:
            raise QueryFailed(f"the query took longer than {timeout_s:g} s") from error
        raise QueryFailed(f"SQL error: {error}") from error
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise QueryFailed(f"the query returns more than {MAX_ROWS} rows")
    return names, rows


_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_PRAGMA,
}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info", "database_list"}


def _read_only(action: int, first: str | None, second: str | None, *_: Any) -> int:
    pragma = action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _PRAGMAS
    loads_code = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() == "load_extension"
    return sqlite3.SQLITE_DENY if action not in _ALLOWED or pragma or loads_code else sqlite3.SQLITE_OK


def as_table(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Return rows as an aligned table; only ``FIRST_ROWS`` of them if it exceeds ``MAX_CHARACTERS``."""
    text = _aligned(names, rows)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"The first {FIRST_ROWS} of {len(rows)} rows: {_aligned(names, rows[:FIRST_ROWS])}"[:MAX_CHARACTERS]


def _aligned(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    cells = [names, *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def submitted_query(transcript: str) -> str | None:
    """Return the query that a well-formed transcript submits, else None.

    Well-formed: one solution without inner tags, at least one thought, and a thought after every observation.
    """
    before, opened, after = transcript.partition("<solution>")
    query, closed, rest = after.partition("</solution>")
    if not (opened and closed) or "<solution>" in after or "</solution>" in rest:
        return None
    if _INNER_TAG.search(query) or not _THOUGHT.search(transcript):
        return None
    if any(not match[1].lower().startswith("<think>") for match in _AFTER_OBSERVATION.finditer(before)):
        return None
    return query.strip()


class SQLToolGroup(ToolGroup):
    """The tool ``sql``: runs a query on a database and returns its rows as text."""

    def __init__(self, database: Path) -> None:
        self.database = database
        super().__init__("SQLCodeExecutorToolGroup")

    @tool
    def sql(self, query: str | None, turns_left: int) -> str:
        """Return the observation for a query: its rows, or its error."""
        if query is None:
            observation = "There is no query: think in <think></think>, then write one query in <sql></sql>."
        else:
            try:
                observation = as_table(*run_query(self.database, query, EXPLORE_TIMEOUT_S))
            except QueryFailed as error:
                observation = str(error)
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{observation}\n{reminder}</observation>\n\n"


class Text2SQLEnv(BaseTextEnv):
    """Multi-turn SQL, rewarded in the last turn.

    The reward is 1 if the submitted query returns the same set of rows as the reference, 0 if it does not, and −1 if
    the transcript is malformed.

    The row holds ``db_id``, ``data`` (``synsql``, ``spider``, ``bird``) and ``reward_spec.ground_truth``.
    ``env_config.db_path`` is the folder of the databases.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.reference = answer_text(self, require_ground_truth(self))
        source, name = self.extras.get("data"), self.extras.get("db_id")
        if source not in FOLDERS or not name or Path(name).name != name:
            raise ValueError(
                f"text2sql needs data (one of {sorted(FOLDERS)}) and db_id, got {source!r} and {name!r}: set both "
                "columns of the row"
            )
        self.database = Path(env_config.db_path).expanduser() / FOLDERS[source] / name / f"{name}.sqlite"
        if not self.database.is_file():
            raise FileNotFoundError(f"{self.database} does not exist: set environment.skyrl_gym.text2sql.db_path")
        self.max_turns = self.extras.get("max_turns", 5)
        self.init_tool_groups([SQLToolGroup(self.database)])
        self.history: ConversationType = []

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the query, or grade the solution. Raises ValueError if text follows an end tag."""
        check_end_tags(action, ("</sql>", "</solution>"))
        self.turns += 1
        self.history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            return {"observations": [], "reward": self._grade(), "done": True, "metadata": {}}
        query = _SQL.search(action)
        words = query[1] if query else None
        arguments = [words, self.max_turns - self.turns]
        observation = {"role": "user", "content": self._execute_tool("SQLCodeExecutorToolGroup", "sql", arguments)}
        self.history.append(observation)
        metadata = {"tool_group": "SQLCodeExecutorToolGroup", "tool_name": "sql", "tool_input": words}
        return {"observations": [observation], "reward": 0.0, "done": False, "metadata": metadata}

    def _grade(self) -> float:
        query = submitted_query("".join(message["content"] for message in self.history))
        if query is None:
            return -1.0
        _, expected = run_query(self.database, self.reference, GRADE_TIMEOUT_S)
        try:
            _, rows = run_query(self.database, query, GRADE_TIMEOUT_S)
        except QueryFailed:
            return 0.0
        return float(set(rows) == set(expected))

"""Which sampled tokens a request continues, for clients that return an answer in another form than they got it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.graphs import generation

USER = {"role": "user", "content": "How many?"}


GIVEN = '{"of": "apples", "n": [1, {"b": 2, "a": 1}]}'


def call(name="count", arguments=GIVEN, id="call-1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = {"role": "assistant", "content": "I count. ", "tool_calls": [call(), call("wait", "{}", "call-2")]}
RESULTS = [{"role": "tool", "tool_call_id": "call-1", "content": "3"}, {"role": "tool", "content": "4"}]


def reordered(arguments):
    return json.dumps(json.loads(arguments), indent=1, sort_keys=True)


def added(graph, messages, answer, scope=None):
    """The call that answered a request, whose prompt has two more tokens."""
    return graph.add(graph.match(messages, scope), [1, 2], generation(random.Random(0)), answer)


@pytest.mark.parametrize(
    "returned",
    [
        [ANSWER],
        [{**ANSWER, "reasoning_content": "hidden", "reasoning": "hidden", "refusal": None, "annotations": []}],
        [{**ANSWER, "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I count."}]}],
        [
            {
                **ANSWER,
                "tool_calls": [
                    call(arguments=reordered(call()["function"]["arguments"]), id="x"),
                    call("wait", " {} "),
                ],
            }
        ],
        [
            {"tool_calls": ANSWER["tool_calls"][:1], "content": "I count.", "role": "assistant"},
            {"role": "assistant", "tool_calls": ANSWER["tool_calls"][1:]},
        ],
        [{**ANSWER, "tool_calls": [call(arguments=json.loads(GIVEN)), call("wait", {})]}],
    ],
    ids=["same", "without thinking", "as parts", "reformatted", "in two items", "arguments as objects"],
)
def test_an_answer_matches_in_every_form_that_clients_return_it(returned):
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    first = added(graph, [USER], ANSWER)
    match = graph.match([USER, *returned, *RESULTS])
    assert (match.parent, match.used, match.unmatched) == (first, 1 + len(returned), None)
    second = added(graph, [USER, *returned, *RESULTS], {"role": "assistant", "content": "7"})
    assert second.parent is first and second.prompt_ids == [*first.ids, 1, 2]
    assert graph.leaves() == [second] and not graph.forks()


@pytest.mark.parametrize(
    "edited",
    [
        [USER, {**ANSWER, "content": "I counted."}, *RESULTS],
        [USER, {**ANSWER, "tool_calls": [call(arguments='{"of": "pears"}'), call("wait", "{}")]}, *RESULTS],
        [{"role": "user", "content": "How many?\n"}, ANSWER, *RESULTS],
        [USER, {**ANSWER, "tool_calls": ANSWER["tool_calls"][::-1]}, *RESULTS],
    ],
    ids=["text", "argument", "prompt", "order of calls"],
)
def test_an_edited_history_is_a_fork_and_names_the_message(edited):
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    added(graph, [USER], ANSWER)
    match = graph.match(edited)
    at = next(place for place, message in enumerate(edited) if message["role"] == "assistant")
    assert (match.parent, match.used, match.unmatched) == (None, 0, at)
    assert added(graph, edited, {"role": "assistant", "content": "no"}).text_only and graph.forks() == 1


def test_other_tools_make_another_prompt():
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    added(graph, [USER], ANSWER, scope={"tools": [1]})
    assert graph.match([USER, ANSWER], {"tools": [1]}).parent is not None
    assert graph.match([USER, ANSWER], {"tools": [2]}).parent is None


def test_compaction_and_edits_after_an_answer_fork_where_they_branch_off():
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    said = [{"role": "assistant", "content": str(number)} for number in range(3)]
    asked = [{"role": "user", "content": f"q{number}"} for number in range(3)]
    calls = []
    for number in range(3):
        history = [each for pair in zip(asked, said, strict=True) for each in pair][: 2 * number]
        calls.append(added(graph, [*history, asked[number]], said[number]))
    assert [each.parent for each in calls] == [None, *calls[:2]]
    other = {"role": "user", "content": "another"}
    fork = added(graph, [asked[0], said[0], other], said[2])
    assert fork.parent is calls[0] and graph.leaves() == [calls[2], fork]
    summary = added(graph, [{"role": "user", "content": "summary of q0 to q2"}], said[0])
    assert summary.parent is None and not summary.text_only and graph.forks() == 2
    # the longest path counts, though an answer in the middle is the client's own
    own = [asked[0], said[0], other, said[2], {"role": "user", "content": "more"}]
    assert graph.match(own).parent is fork


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_no_content_of_a_message_raises(content):
    from skyrl_megatron_agents.graph import Graph

    message = {"role": "assistant", "content": content, "tool_calls": [{"function": {"arguments": content}}]}
    graph = Graph()
    added(graph, [{"role": "user", "content": content}], message)
    assert graph.match([{"role": "user", "content": content}, message]).parent is graph.calls[0]


@pytest.mark.parametrize(
    ("edit", "theirs", "ours"),
    [
        (lambda said: [{**said[0], "content": "How much?"}, *said[1:]], '"text":"How much?"', '"text":"How many?"'),
        (lambda said: [*said[:4], {"role": "assistant", "content": "4"}, said[5]], '"text":"4"', '"text":"It is 3."'),
        (lambda said: said[:3] + said[4:], '"text":"It is 3."', '"role":"tool","text":"4"'),
    ],
    ids=["first message", "last answer", "a message is left out"],
)
def test_the_first_differing_message_is_named(edit, theirs, ours):
    from skyrl_megatron_agents.graph import Graph

    graph, last = Graph(), {"role": "assistant", "content": "It is 3."}
    added(graph, [USER], {"role": "assistant", "content": "a sibling"})
    added(graph, [USER], ANSWER)
    added(graph, [USER, ANSWER, *RESULTS], last)
    match = graph.match(edit([USER, ANSWER, *RESULTS, last, {"role": "user", "content": "So?"}]))
    sent, _, known = graph.difference(match).partition(" where call ")
    assert theirs in sent and ours in known and ours not in sent


def test_a_difference_deep_in_a_long_message_is_shown():
    from skyrl_megatron_agents.graph import Graph

    graph, filler = Graph(), "word " * 5000
    added(graph, [USER], {"role": "assistant", "content": f"{filler}left{filler}"})
    match = graph.match([USER, {"role": "assistant", "content": f"{filler}right{filler}"}])
    found = graph.difference(match)
    assert "right" in found and "left" in found and len(found) < 1200


def test_other_tools_are_named_as_the_difference():
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    added(graph, [USER], ANSWER, scope={"tools": [1]})
    assert "its tools" in graph.difference(graph.match([USER, ANSWER], {"tools": [2]}))


# ------------------------------------------------------------------ conversations
TITLE = {"role": "system", "content": "You write titles of at most five words."}
SYSTEM = {"role": "system", "content": "You are an agent that works on files. Today is Monday. " * 3}


def paths(graph, rule="final"):
    from skyrl_megatron_agents.rows import targets_of

    return [[call.number for call in path] for path, _ in targets_of(graph, rule)]


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("tools", [0, 2])
def test_side_requests_are_conversations_of_their_own_and_no_path_of_the_task(place, tools):
    """Titles have no system prompt of the task, memories quote what was said in it, in other words or in the same."""
    from skyrl_megatron_agents.graph import Graph

    graph, scope = Graph(), {"tools": [{}] * tools}
    quoted = [USER, ANSWER, *RESULTS, {"role": "assistant", "content": "It is… (cut)"}]

    def side():
        for system in (TITLE, {"role": "system", "content": "Memory: list what you learned."}):
            made = added(
                graph, [system, *quoted, {"role": "user", "content": "Now."}], {"role": "assistant", "content": "T"}
            )
            assert made.parent is None and not made.text_only

    if place == "before":
        side()
    first = added(graph, [SYSTEM, USER], ANSWER, scope)
    if place == "between":
        side()
    second = added(graph, [SYSTEM, USER, ANSWER, *RESULTS], {"role": "assistant", "content": "It is 7."}, scope)
    if place == "after":
        side()
    assert second.parent is first and paths(graph) == [[first.number, second.number]]
    assert len(paths(graph, "all")) == 3 and not any(call.text_only for call in graph.calls)


def test_a_conversation_of_memories_must_return_its_own_answers():
    """What it quotes is not the policy's in it, what was sampled in it is."""
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    added(graph, [SYSTEM, USER], ANSWER)
    first = [TITLE, USER, ANSWER, {"role": "user", "content": "A title?"}]
    title = added(graph, first, {"role": "assistant", "content": "Counting"})
    kept = graph.match([*first, {"role": "assistant", "content": "Counting"}, USER])
    edited = graph.match([*first, {"role": "assistant", "content": "Counted"}, USER])
    assert kept.parent is title and kept.unmatched is None and edited.unmatched == 4


def test_a_summary_of_another_conversation_replaces_the_history_of_the_task():
    """As opencode compacts: what the policy said there is an assistant's message here. It forks, and is continued."""
    from skyrl_megatron_agents.graph import Graph

    graph, scope, asked = Graph(), {"tools": [{}]}, {"role": "user", "content": "What did we do so far?"}
    added(graph, [SYSTEM, USER], ANSWER, scope)
    summary = {"role": "assistant", "content": "We counted apples."}
    added(
        graph, [{"role": "system", "content": "You sum up what was said."}, {"role": "user", "content": "…"}], summary
    )
    compacted = [SYSTEM, asked, summary, {"role": "user", "content": "Continue."}]
    fork = added(graph, compacted, ANSWER, scope)
    assert fork.parent is None and not fork.text_only
    again = added(graph, [*compacted, ANSWER, *RESULTS], {"role": "assistant", "content": "It is 7."}, scope)
    assert again.parent is fork and not again.text_only and len(paths(graph, "all")) == 3
    edited = {"role": "assistant", "content": "We counted pears."}
    assert graph.match([SYSTEM, asked, edited, USER], scope).unmatched == 2
    moved = {**summary, "tool_calls": ANSWER["tool_calls"]}
    assert graph.match([SYSTEM, asked, moved, *RESULTS], scope).unmatched == 2, "nobody said that there"
    said_here = {"role": "assistant", "content": "It is 7."}
    assert graph.match([SYSTEM, asked, said_here, USER], scope).unmatched == 2, "an answer of the task, moved"


def test_two_roles_that_share_a_history_hold_answers_that_are_text():
    """Each answers under a system prompt of its own: what the other said is no summary, and its tokens are lost."""
    from skyrl_megatron_agents.graph import Graph

    graph, history, found = Graph(), [USER], []
    systems = [{"role": "system", "content": text} for text in ("You plan the next step.", "Act on what was planned.")]
    for turn in range(6):
        answer = {"role": "assistant", "content": f"Answer {turn}."}
        found.append(added(graph, [systems[turn % 2], *history], answer).text_only)
        history += [answer, {"role": "user", "content": "Go on."}]
    assert found == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    "other", [SYSTEM["content"].replace("Monday", "Tuesday"), SYSTEM["content"] + " Be brief.", ""]
)
def test_a_system_prompt_that_changes_from_call_to_call_is_still_noticed(other):
    """Its answers are text in each prompt. Without any system prompt in both, likewise."""
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    added(graph, [SYSTEM, USER] if other else [USER, {"role": "user", "content": "x"}], ANSWER)
    changed = graph.match([{"role": "system", "content": other}, USER, ANSWER, *RESULTS] if other else [USER, ANSWER])
    assert changed.parent is None and changed.unmatched is not None


def test_the_path_of_the_task_outlives_compaction_and_titles_that_are_longer():
    from skyrl_megatron_agents.graph import Graph

    graph, scope = Graph(), {"tools": [{}]}
    added(graph, [SYSTEM, USER], ANSWER, scope)
    added(graph, [SYSTEM, USER, ANSWER, *RESULTS], {"role": "assistant", "content": "It is 7."}, scope)
    added(
        graph, [SYSTEM, {"role": "user", "content": "Summary: 7 apples"}], {"role": "assistant", "content": "7"}, scope
    )
    said = [TITLE, USER]
    for number in range(4):
        answer = {"role": "assistant", "content": str(number)}
        added(graph, said, answer)
        said += [answer, USER]
    assert paths(graph) == [[0, 1]]


@pytest.mark.parametrize(
    ("sampled", "returned"),
    [
        ("<think>I count.</think>It is 7.", "It is 7."),
        ("<think>I count.</think>It is 7.", "<think>\nI count.\n</think>\n\nIt is 7."),
        ("I count.</think>\n\nIt is 7.", "It is 7."),
        ("<think>\n</think>\nIt is 7.", "It is 7."),
        ("<seed:think>Hm.</seed:think>It is 7.", "It is 7."),
        ("◁think▷Hm.◁/think▷It is 7.", "It is 7."),
    ],
)
def test_thinking_in_the_content_may_be_dropped_or_reformatted(sampled, returned):
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    first = added(graph, [USER], {"role": "assistant", "content": sampled})
    assert graph.match([USER, {"role": "assistant", "content": returned}, USER]).parent is first
    assert graph.match([USER, {"role": "assistant", "content": returned + "!"}, USER]).parent is None


def test_of_answers_that_differ_in_thinking_the_returned_one_continues():
    from skyrl_megatron_agents.graph import Graph

    graph = Graph()
    contents = [f"<think>{word}</think>It is 7." for word in ("one", "two", "three")]
    made = [added(graph, [USER], {"role": "assistant", "content": content}) for content in contents]
    for call, content in zip(made, contents, strict=True):
        assert graph.match([USER, {"role": "assistant", "content": content}]).parent is call
    assert graph.match([USER, {"role": "assistant", "content": "It is 7."}]).parent is made[-1]


def test_the_longest_tokens_that_a_prompt_begins_with_are_found():
    from tests.agents.graphs import random_graph

    for seed in range(50):
        graph = random_graph(seed, 12)
        for call in graph.calls:
            tokens = [*call.ids, 99]
            fits = [each for each in graph.calls if tokens[: len(each.ids)] == each.ids]
            assert len(graph.continued(tokens).ids) == max(len(each.ids) for each in fits)
        assert graph.continued([99]) is None

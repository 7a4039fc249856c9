"""kill -9 at every phase of a step, and in the middle of every write: nothing is lost, sampled or trained twice."""

import pytest

from tests.support import forked
from tests.trainer import stream_runner
from tests.trainer.stream_runner import BATCH, BOUND, STEPS

pytestmark = pytest.mark.process
POINTS = {
    "sampling": (1, 9, 17),
    "writing groups": (1, 6, 14, 23),
    "recorded": (1, 5),
    "training": (1, 4),
    "writing schedule": (1, 3, 5),
    "scheduled": (1, 4),
    "before manifest": (1, 2),
    "before rename": (1, 2),
    "before pointer": (1, 2),
    "during prune": (1,),
    "saved": (1, 2),
    "freeing": (1, 2),
    "freed": (1, 2),
    "sync": (1, 3, 5),
}
"""Where a process ends, and for which times that it comes by."""
CASES = [
    pytest.param(point, hit, marks=[] if hit == hits[-1] else pytest.mark.full_matrix)
    for point, hits in POINTS.items()
    for hit in hits
]


def life(folder, seed, point=None, hit=0):
    """What a process said until it ended; None in place of an exit code of 0."""
    context = forked.context()
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=stream_runner.run, args=(str(folder), seed, point, hit, there))
    child.start()
    there.close()
    said = []
    try:
        while here.poll(60):
            said.append(here.recv())
    except EOFError:
        pass
    child.join(60)
    assert child.exitcode is not None, "it hangs"
    return said, child.exitcode


def check(said):
    """Nothing that was safe is sampled again; steps that were lost are taken as they were; the bound holds."""
    kept, taken = set(), {}
    for what, *about in said:
        if what == "sampled":
            number, sample, place = about
            assert (number, sample, place) not in kept and number not in kept, about
        elif what == "kept":
            kept.add(tuple(about))
        elif what == "finished":
            kept.add(about[0])
        elif what == "took":
            step, groups, ages = about
            assert taken.setdefault(step, groups) == groups, f"step {step} is taken as it was"
            assert 0 <= min(ages) and max(ages) <= BOUND
    return taken


@pytest.mark.parametrize("point, hit", CASES)
def test_killed_at(tmp_path, point, hit):
    first, code = life(tmp_path, 1, point, hit)
    assert code == -9, f"it never came to {point!r} for the {hit}. time: {first[-3:]}"
    second, code = life(tmp_path, 2)
    assert code == 0 and second[-1][0] == "over", second[-3:]
    taken = check([*first, *second])
    assert second[-1][1] == [[step, taken[step]] for step in range(1, STEPS + 1)], "what the weights learned from"
    numbers = [number for groups in taken.values() for number, _ in groups]
    assert len(numbers) == len(set(numbers)) == BATCH * STEPS


@pytest.mark.full_matrix
def test_killed_again_and_again(tmp_path):
    """One point after the other, in the lives of one run."""
    said, lives = [], 0
    for seed, point in enumerate([*POINTS, *POINTS]):
        found, code = life(tmp_path, seed, point, 1)
        said, lives = said + found, lives + 1
        if code == 0:
            break
    else:
        found, code = life(tmp_path, 99)
        said += found
    assert code == 0 and lives > 4
    taken = check(said)
    assert said[-1] == ("over", [[step, taken[step]] for step in range(1, STEPS + 1)])

"""The dashboard in a real Chromium: plots hold something, keys work, a run is followed, a long one opens."""

import json
import re
import threading

import pytest

pytestmark = pytest.mark.process

VIEWS = ["overview", "time", "experts", "weights", "samples", "agents", "all metrics", "settings"]
PLOTS = {
    "overview": [
        "reward",
        "pass at n",
        "warm-up by imitation",
        "KL to the reference",
        "entropy",
        "gradient norm",
        "loss",
        "response length",
        "clipped",
        "log-prob difference, trainer − engine",
        "probability ratio",
        "groups without variance",
        "learning rate",
        "throughput",
        "share of the tokens that shared prefixes save",
        "MFU",
    ],
    "time": [
        "phases",
        "lanes",
        "time of a trajectory",
        "memory: trainer",
        "memory: policy on its devices",
        "FLOP/s per rank",
    ],
    "experts": [
        "load of the busiest expert",
        "experts without tokens",
        "entropy of the router",
        "load of the busiest EP rank, by micro-batch",
        "load of the busiest EP rank, by step",
        "experts moved",
        "time to plan and move",
        "routing replay",
    ],
    "weights": [
        "staleness",
        "weight sync",
        "bandwidth",
        "log-prob difference after a sync",
        "groups waiting and in flight",
    ],
    "agents": ["token-in rate", "calls of agents", "unmatched, unattributed, refused", "outcomes"],
    "all metrics": ["async/buffer_size", "policy/grad_norm", "trainer/tokens_per_second"],
}
MARKS = "document.querySelector({}).querySelectorAll('path.curve[d^=M], path.layer[d^=M], rect.span').length"


def export(folder, *runs):
    from skyrl_megatron_observe.run_report import RunReader, write_page

    readers = [RunReader(run) for run in runs]
    for reader in readers:
        reader.refresh()
    write_page(readers, folder / "report.html")
    return f"file://{folder}/report.html"


@pytest.fixture(scope="module")
def report(made, tmp_path_factory):
    return export(tmp_path_factory.mktemp("report"), made)


def choose(page, view):
    page.press(str(VIEWS.index(view) + 1))
    assert page.run("document.querySelector('[role=tab][aria-selected=true]').dataset.view") == view


def marks(page, plot):
    return page.run(MARKS.format(json.dumps(f'[data-chart="{plot}"]')))


@pytest.mark.parametrize("width", [1280, 390])
def test_every_plot_is_there_and_holds_something(quiet, report, width):
    quiet.size(width, dark=width == 390)
    quiet.open(report)
    for view, plots in PLOTS.items():
        choose(quiet, view)
        for plot in plots:
            place = json.dumps(f'[data-chart="{plot}"]')
            assert quiet.run(f"!!document.querySelector({place})"), f"{view}: no plot {plot!r}"
            quiet.run(f"document.querySelector({place}).scrollIntoView()")
            quiet.wait(f"{MARKS.format(place)} > 0")
        wide = quiet.run("document.documentElement.scrollWidth")
        assert wide <= width, f"{view} is {wide} pixels wide in a window of {width}"
        tab = quiet.run("document.querySelector('[aria-selected=true]').getBoundingClientRect().toJSON()")
        assert tab["left"] > -1 and tab["right"] < width + 1, f"the tab {view} is out of sight"


def test_metrics_are_found_by_a_part_of_their_name(quiet, report):
    quiet.open(report)
    choose(quiet, "all metrics")
    quiet.run(
        "(search => { search.value = 'entropy'; search.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[aria-label=\"find metrics\"]'))"
    )
    shown = quiet.run("[...document.querySelectorAll('[data-chart]')].map(plot => plot.dataset.chart)")
    assert shown == ["policy/moe_router_entropy", "policy/policy_entropy"]
    for plot in shown:
        quiet.wait(f"{MARKS.format(json.dumps(f'[data-chart="{plot}"]'))} > 0")


def test_heat_maps_are_painted(quiet, report):
    quiet.open(report)
    choose(quiet, "experts")
    painted = (
        "[...document.querySelectorAll('canvas')].map(c => new Set(c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data.filter((_, i) => i % 4 === 0)).size)"
    )
    quiet.wait(f"{painted}.every(colours => colours > 5)")
    assert len(quiet.run(painted)) == 2
    numbers = quiet.run(
        "[...document.querySelectorAll('.heat .ticks')].map(t => [...t.children].map(s => s.textContent))"
    )
    assert [marks[0].split()[0] for marks in numbers] == ["layer", "expert", "expert", "step"]
    assert all(marks[-1].isdigit() for marks in numbers), numbers


def test_an_axis_says_what_it_counts(quiet, report):
    quiet.open(report)
    for view in ("overview", "time"):
        choose(quiet, view)
        quiet.wait("document.querySelectorAll('svg .axis').length > 2")
        assert set(quiet.run("[...document.querySelectorAll('svg .axis')].map(t => t.textContent)")) == {"step"}


def made_lines(made):
    return [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]


def test_lanes_of_a_step(quiet, report, made):
    """Trainer, two engines and four ranks; a lane says how much of the step it works. Next to them are its tokens."""
    quiet.open(report)
    choose(quiet, "time")
    quiet.wait("document.querySelector('[data-chart=lanes] rect.span')")
    texts = quiet.run("[...document.querySelectorAll('[data-chart=lanes] text')].map(each => each.textContent)")
    lanes = ["trainer", "engine 0", "engine 1", "policy rank 0", "policy rank 1", "policy rank 2", "policy rank 3"]
    assert all(any(text.startswith(lane) for text in texts) for lane in lanes), texts
    assert sum(text.endswith(" %") for text in texts) == 7
    [line] = [line for line in made_lines(made) if line["step"] == 37]
    saved, total = line["policy/shared_prefix_share"], line["trainer/tokens_per_second"] * line["timing/step"]
    text = quiet.run("document.querySelector('[data-tokens]').textContent")
    unique, of, share = re.match(r"unique tokens ([\d.]+)k of ([\d.]+)k: ([\d.]+) %", text).groups()
    assert float(share) == pytest.approx(100 * saved, abs=0.06) and float(of) == pytest.approx(total / 1e3, rel=0.01)
    assert float(unique) == pytest.approx((1 - saved) * total / 1e3, rel=0.01)


def test_the_legend_gives_the_values_at_the_cursor(quiet, report, made):
    quiet.open(report)
    quiet.run("document.querySelector('[data-chart=\"gradient norm\"]').focus()")
    quiet.wait("document.querySelector('[data-chart=\"gradient norm\"]').parentNode.querySelector('b')")
    quiet.press("Home")
    quiet.press("ArrowRight")
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    want = next(line for line in lines if line["step"] == 2)["policy/grad_norm"]
    shown = quiet.run(
        "document.querySelector('[data-chart=\"gradient norm\"]').parentNode.querySelector('b').textContent"
    )
    assert float(shown) == pytest.approx(want, rel=1e-3)


def test_no_two_curves_of_a_chart_have_one_label(quiet, report):
    """``policy/mfu`` and ``generate/mfu`` are both short for ``mfu``."""
    quiet.open(report)
    labels = {}
    for view in ("overview", "time"):
        choose(quiet, view)
        for plot in set(PLOTS[view]) - {"phases", "lanes"}:
            place = f"document.querySelector({json.dumps(f'[data-chart="{plot}"]')})"
            quiet.run(f"{place}.scrollIntoView()")
            buttons = f"[...{place}.parentNode.querySelectorAll('.legend button')]"
            text = "[...each.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join('').trim()"
            quiet.wait(f"{buttons}.length > 0")
            labels[plot] = quiet.run(f"{buttons}.map(each => {text})")
    assert {"policy/mfu", "generate/mfu", "score_mfu"} <= set(labels["MFU"]), labels
    assert "max_num_tokens" in labels["response length"]
    assert not {plot: found for plot, found in labels.items() if len(set(found)) < len(found)}


def test_keys_move_between_views_and_samples(quiet, report):
    quiet.open(report)
    quiet.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for view in VIEWS[1:]:
        quiet.press("ArrowRight")
        assert quiet.run("document.activeElement.dataset.view") == view
    choose(quiet, "samples")
    quiet.wait("document.querySelectorAll('.samplelist tbody tr').length === 8")
    quiet.run("document.querySelector('tr.chosen').focus()")
    quiet.press("ArrowDown")
    assert (
        quiet.run("[...document.querySelectorAll('.samplelist tbody tr')].findIndex(r => r.className === 'chosen')")
        == 1
    )
    quiet.run("document.querySelector('.strip').focus()")
    quiet.press("ArrowRight")
    said = quiet.run("document.querySelector('.strip + .note').textContent")
    assert said.startswith("token 0 of 400") and "engine" in said and "advantage" in said


def test_samples_say_what_their_file_says(quiet, report, made):
    """Text, colours by every kind, turns, a tool's call, and groups with one reward."""
    quiet.open(report)
    choose(quiet, "samples")
    quiet.wait("document.querySelector('.strip b')")
    text = quiet.run("[...document.querySelectorAll('.strip b')].map(each => each.textContent).join('')")
    assert "How many rows has the table orders?" in text and "SELECT count(*) FROM orders" in text
    kinds = quiet.run(
        "[...document.querySelector('select[aria-label=\"colour tokens by\"]').options].map(o => o.value)"
    )
    assert set(kinds) >= {"log-prob difference", "advantage", "log-prob", "mask", "version", "reward"}
    chosen = "document.querySelector('select[aria-label=\"colour tokens by\"]')"
    quiet.run(f"{chosen}.value = 'log-prob difference'; {chosen}.dispatchEvent(new Event('change'))")
    scale = quiet.run("document.querySelector('.row .unit .scale').nextSibling.textContent")
    assert 0 < float(scale) < 0.004, "what the environment said has no log-probs to compare"
    last = max(made.glob("samples/*.json"), key=lambda path: int(path.stem[5:]))
    record = json.loads(last.read_text())
    assert quiet.run("document.querySelectorAll('.groups button').length") == record["group_count"] == 6
    assert quiet.run("document.querySelectorAll('.groups button.flat').length") == record["flat_groups"] >= 1
    quiet.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'conversation').click()")
    turns = quiet.run("[...document.querySelectorAll('.turn')].map(turn => turn.classList[1])")
    assert turns == ["prompt", "policy", "environment", "policy"]
    assert (
        quiet.run("document.querySelector('.tool').textContent")
        == "<tool_call>SELECT count(*) FROM orders</tool_call>"
    )


def test_a_trajectory_is_drawn_as_its_graph(quiet, report, made):
    """Boxes and lines for calls and their parents, colours by row, the first unmatched message, and a path's text."""
    quiet.open(report)
    choose(quiet, "agents")
    quiet.wait("document.querySelector('svg.calls rect')")
    last = max(made.glob("trajectories/*.jsonl"), key=lambda path: int(path.stem[5:]))
    kept = [json.loads(line) for line in last.read_text().splitlines()]
    shown = quiet.run("[...document.querySelectorAll('.samplelist tbody tr')].map(row => row.textContent)")
    assert len(shown) == len(kept) == 3 and "context full" in shown[2]
    for number, found in enumerate(kept):
        quiet.run(f"document.querySelectorAll('.samplelist tbody tr')[{number}].click()")
        boxes = "[...document.querySelectorAll('svg.calls g')]"
        assert quiet.run(f"{boxes}.length") == len(found["calls"]) == found["count"]
        lines = quiet.run("document.querySelectorAll('svg.calls path.edge').length")
        assert lines == sum(call["parent"] is not None for call in found["calls"]) > 1
        known = {"trained": lambda call: call["row"] is not None, "unmatched": lambda call: call["unmatched"]}
        for name, is_so in known.items():
            drawn = quiet.run(f"{boxes}.map(g => g.querySelector('rect').classList.contains('{name}'))")
            assert drawn == [is_so(call) for call in found["calls"]]
        assert found["outcome"] in quiet.run("document.querySelector('.samples .card:last-child h3').textContent")
        assert "I looked it up." in quiet.run("document.querySelector('.differs').textContent")
    quiet.run("document.querySelector('svg.calls g').dispatchEvent(new MouseEvent('click'))")
    quiet.run("document.querySelector('svg.calls g').focus()")
    quiet.press("ArrowRight")
    assert quiet.run("document.activeElement.getAttribute('aria-label')").startswith("call 1: ")
    turns = quiet.run("[...document.querySelectorAll('.messages .turn')].map(turn => turn.textContent)")
    assert len(turns) == 4 and "not trained on" in turns[1] and "SELECT count(*) FROM orders" in turns[3]
    quiet.run("document.querySelector('.samplelist tr.chosen').focus()")
    for key, row in (("ArrowDown", 2), ("ArrowUp", 1), ("End", 2), ("Home", 0), ("ArrowUp", 0)):
        quiet.press(key)
        assert quiet.run("document.activeElement.sectionRowIndex") == row


def test_a_long_sample_scrolls(quiet, tmp_path):
    """32,768 tokens: all are there, and the last one is reached by one key."""
    from tests.observe.made_run import write_run

    quiet.open(export(tmp_path, write_run(tmp_path, 1, tokens=32_768)))
    choose(quiet, "samples")
    quiet.wait("document.querySelectorAll('.strip b').length > 32768")
    quiet.run("document.querySelector('.strip').focus()")
    quiet.press("End")
    assert quiet.run("document.querySelector('.strip').scrollTop") > 1000
    assert "token 32767 of 32768" in quiet.run("document.querySelector('.strip + .note').textContent")


def test_runs_are_compared(quiet, made, tmp_path):
    from tests.observe.made_run import write_run

    other = write_run(tmp_path, 20, name="other", trainer__seed=7, trainer__algorithm__kl_loss_coef=0.5)
    quiet.open(export(tmp_path, made, other))
    assert quiet.wait(MARKS.format("'[data-chart=entropy]'")) == 2
    choose(quiet, "settings")
    keys = quiet.run(
        "[...document.querySelectorAll('.settings tbody tr td:first-child')].map(each => each.textContent)"
    )
    expected = {
        f"trainer.{name}" for name in ("algorithm.kl_loss_coef", "log_path", "max_training_steps", "run_name", "seed")
    }
    assert set(keys) == expected


def test_a_run_is_followed(quiet, tmp_path):
    """From the server: a step that is written appears without a reload; a run that begins anew replaces the old."""
    from skyrl_megatron_observe.dashboard import DashboardServer
    from skyrl_megatron_observe.run_report import RunReader
    from tests.observe.made_run import write_run

    run = write_run(tmp_path, 5)
    with DashboardServer([RunReader(run)]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        quiet.open(server.url)
        quiet.wait("document.getElementById('status').textContent.includes('step 5 of 5')")
        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().splitlines()
        with metrics.open("a") as file:
            file.write(json.dumps({**json.loads(lines[-1]), "step": 6}) + "\n" + '{"step": 7, "rew')
        quiet.wait("document.getElementById('status').textContent.includes('step 6')")
        metrics.write_text("\n".join(lines[:6]) + "\n")
        quiet.wait("document.getElementById('status').textContent.includes('step 2')")
        choose(quiet, "samples")
        quiet.wait("document.querySelector('.strip b')")
        server.shutdown()
    quiet.wait("document.getElementById('status').textContent.includes('server lost')")
    quiet.send("Page.navigate", url="about:blank")  # which ends the page's questions
    quiet.errors[:] = [error for error in quiet.errors if "ERR_CONNECTION" not in error]  # the server that is gone


@pytest.mark.full_matrix
def test_a_long_run_opens(quiet, tmp_path):
    """10,000 steps of 120 metrics: one file of at most 10 MB, with every spike."""
    from tests.observe.long_run import write_long_run

    run = write_long_run(tmp_path, 10_000)
    address = export(tmp_path, run)
    assert (tmp_path / "report.html").stat().st_size < 10e6
    quiet.open(address)
    assert quiet.wait(MARKS.format("'[data-chart=reward]'")) > 0
    assert quiet.run("document.getElementById('status').textContent") == "step 10k"
    card = "document.querySelector('[data-chart=\"gradient norm\"]')"
    labels = quiet.run(f"[...{card}.querySelectorAll('text')].map(each => each.textContent)")
    assert "1M" in labels, f"the only value of a million is drawn: {labels}"

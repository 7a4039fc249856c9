"""What others are told of a run: Prometheus scrapes it, an OpenTelemetry collector gets its spans."""

import http.server
import json
import urllib.error
import urllib.request

import pytest

from tests.support.serving import serving


def test_prometheus_reads_the_last_numbers():
    """With Prometheus' own parser; nothing is told without the token."""
    from prometheus_client.parser import text_string_to_metric_families

    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron_observe.exporters import PrometheusEndpoint
    from tests.support.rank_pool import lasting_port

    endpoint = PrometheusEndpoint(lasting_port(), "secret")
    try:
        endpoint.log({"policy/grad_norm": 1.5, "eval/all/avg_score": 0.25}, 3)
        endpoint.log({"policy/grad_norm": 2.5, "environment/a b-c": float("nan")}, 4)
        address = f"http://127.0.0.1:{endpoint.port}/metrics"
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(address, headers=header), timeout=30)
        asked = urllib.request.Request(address, headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        with pytest.raises(LaunchError, match=f"trainer.prometheus_port={endpoint.port}: .*choose another port"):
            PrometheusEndpoint(endpoint.port, "secret")
    finally:
        endpoint.finish()
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values.pop("skyrl_environment_a_b_c") != 0
    assert values == {"skyrl_policy_grad_norm": 2.5, "skyrl_eval_all_avg_score": 0.25, "skyrl_step": 4.0}
    assert "Norm of the gradient" in families["skyrl_policy_grad_norm"].documentation


@pytest.fixture
def collector():
    """A server that takes what is posted."""
    taken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            taken.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with serving(http.server.HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}", taken


def test_a_step_is_a_trace(collector):
    from skyrl_megatron_observe.exporters import SpanSender

    address, taken = collector
    sender = SpanSender(address + "/", "project/run")
    sender.send(7, [("trainer", "generate", 100.0, 101.5), ("policy rank 0", "train_mini_batch", 101.5, 103.25)])
    sender.send(8, [])
    sender.finish()
    [(path, body)] = taken
    assert path == "/v1/traces"
    [resource] = body["resourceSpans"]
    facts = {each["key"]: each["value"] for each in resource["resource"]["attributes"]}
    assert facts == {"service.name": {"stringValue": "skyrl-megatron"}, "run": {"stringValue": "project/run"}}
    root, generate, train = resource["scopeSpans"][0]["spans"]
    assert root["name"] == "step 7" and "parentSpanId" not in root
    assert (root["startTimeUnixNano"], root["endTimeUnixNano"]) == ("100000000000", "103250000000")
    assert generate["parentSpanId"] == train["parentSpanId"] == root["spanId"]
    assert {len(span["traceId"]) for span in (root, generate, train)} == {32}
    assert len({span["spanId"] for span in (root, generate, train)}) == 3 and len(root["spanId"]) == 16
    assert train["attributes"] == [{"key": "lane", "value": {"stringValue": "policy rank 0"}}]


@pytest.mark.filterwarnings("ignore::skyrl_megatron.errors.SkyRLMegatronWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_collector_that_is_away_costs_no_run():
    from skyrl_megatron_observe.exporters import SpanSender
    from tests.support.rank_pool import lasting_port

    sender = SpanSender(f"http://127.0.0.1:{lasting_port()}", "run")
    sender.send(1, [("trainer", "generate", 0.0, 1.0)])
    sender._thread.join(30)
    assert not sender._thread.is_alive()
    sender.send(2, [("trainer", "generate", 1.0, 2.0)])
    sender.finish()


def test_spans_of_one_name_that_touch_are_one():
    from skyrl_megatron import progress as spans

    spans.take()
    for begin in (1.0, 1.5, 3.0):
        spans.record("engine 0", "requests", begin, begin + 0.5)
    with spans.span("trainer", "generate"):
        pass
    taken = spans.take()
    assert [each[:2] for each in taken] == [("engine 0", "requests")] * 2 + [("trainer", "generate")]
    assert taken[0][2:] == (1.0, 2.0) and spans.take() == []


def test_lanes_have_the_trainer_first_and_long_spans_before_what_they_hold():
    from skyrl_megatron_observe.timeline import lanes

    found = [
        ("policy rank 10", "train", 101.0, 102.0),
        ("policy rank 2", "optim_step", 101.5, 102.0),
        ("policy rank 2", "train", 101.0, 102.0),
        ("trainer", "generate", 100.0, 101.0),
    ]
    line = lanes(3, found)
    assert list(line["lanes"]) == ["trainer", "policy rank 2", "policy rank 10"] and line["began"] == 100.0
    assert line["lanes"]["policy rank 2"] == [("train", 1.0, 2.0), ("optim_step", 1.5, 2.0)]

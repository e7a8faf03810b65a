"""The timeline of a GPU call: synthetic intervals become a trace and a table."""

import json

import numpy as np
import pytest

from gpu_case import SimulatedRanks
from jax_megamoe._ffi import native
from jax_megamoe.cli import main
from jax_megamoe.cli import timeline as command
from jax_megamoe.devtools import gpu_measure, timeline
from jax_megamoe.devtools.gpu_harness import TRACE_DTYPE

NAMES = native.GPU_TRACE_NAMES
START = 1_764_500_000_000_000_000  # nanoseconds since 1970: more than a float64 tells apart
EMPTY = np.zeros(0, TRACE_DTYPE)


def lane(*events):
    """(begin, end) in nanoseconds after START, name, block."""
    rows = [(START + b, START + e, NAMES.index(name), block) for b, e, name, block in events]
    return np.array(rows, TRACE_DTYPE)


def rank(later=0):
    """Two CTAs: math and a loader on the first, a pull warp on the second."""
    first = [EMPTY] * native.GPU_TRACE_LANES
    first[0] = lane(
        (later + 1000, later + 3500, "linear 1", 7), (later + 3501, later + 4000, "swiglu", 7)
    )
    first[4] = lane((later + 250, later + 750, "linear 1", 7))
    second = [EMPTY] * native.GPU_TRACE_LANES
    second[7] = lane((later + 0, later + 125, "pull", 3), (later + 200, later + 500, "pull", 4))
    return [first, second]


def intervals(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_intervals_become_events_with_process_and_thread():
    trace = timeline.chrome_trace([rank(), rank(later=10_000)], [0, 0])
    json.loads(json.dumps(trace))
    found = {
        (e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e["args"]["block"])
        for e in intervals(trace)
    }
    lanes = native.GPU_TRACE_LANES
    for pid, later in ((0, 0.0), (1, 10.0)):  # one GPU, one clock
        assert (pid, 0, "linear 1", 1.0 + later, 2.5, 7) in found
        assert (pid, 4, "linear 1", 0.25 + later, 0.5, 7) in found
        assert (pid, lanes + 7, "pull", 0.2 + later, 0.3, 4) in found
    assert len(found) == 10
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] in ("process_name", "thread_name")
    }
    assert names[0, None] == "rank 0 on GPU 0"
    assert names[1, lanes + 7] == "CTA 1, pull warp 1"
    assert names[0, 0] == "CTA 0, math warpgroup 0"
    assert {(e["pid"], e["tid"]) for e in intervals(trace)} == names.keys() - {(0, None), (1, None)}


def test_each_gpu_has_its_own_clock():
    trace = timeline.chrome_trace([rank(), rank(later=10**9)], [0, 1])
    begins = {pid: min(e["ts"] for e in intervals(trace) if e["pid"] == pid) for pid in (0, 1)}
    assert begins == {0: 0.0, 1: 0.0}


def test_neighbouring_nanoseconds_stay_apart():
    events = [e for e in intervals(timeline.chrome_trace([rank()], [0])) if e["tid"] == 0]
    assert events[1]["ts"] - (events[0]["ts"] + events[0]["dur"]) == pytest.approx(1e-3, rel=1e-6)


def test_summary_of_each_role():
    rows = {(row["role"], row["name"]): row for row in timeline.summary([rank()], [0])}
    assert list(rows) == [
        ("pull", "pull"),
        ("weight loader", "linear 1"),
        ("math", "linear 1"),
        ("math", "swiglu"),
    ]
    pull = rows["pull", "pull"]
    assert pull["count"] == 2 and pull["mean_us"] == pytest.approx(0.2125)
    assert (pull["max_us"], pull["first_us"], pull["last_us"]) == pytest.approx((0.3, 0.0, 0.5))
    assert pull["busy_us"] == pytest.approx(0.425)
    table = timeline.summary_table(timeline.summary([rank()], [0])).splitlines()
    assert len(table) == 2 + 4 and "weight loader" in table[3] and "0.50" in table[3]


def test_open_and_missing_intervals():
    """An interval without an end was cut off by an abort; a call may also have left nothing."""
    timelines = [rank()]
    timelines[0][0][1] = lane((5000, -START, "push", 1))
    assert all(e["name"] != "push" for e in intervals(timeline.chrome_trace(timelines, [0])))
    nothing = [[[EMPTY] * native.GPU_TRACE_LANES]]
    assert intervals(timeline.chrome_trace(nothing, [0])) == []
    assert timeline.summary(nothing, [0]) == []


def test_full_lanes_are_counted():
    timelines = [rank()]
    full = (0, 1, "push", 0)
    timelines[0][0][2] = lane(*[full] * native.GPU_TRACE_EVENTS)
    assert timeline.num_dropped(timelines) == 1 and timeline.num_dropped([rank()]) == 0


class TracedRanks(SimulatedRanks):
    def __init__(self, config, devices, *, trace):
        assert trace
        super().__init__(config, devices)

    def trace(self, number):
        return rank(later=1000 * number)


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_measure, "num_gpus", lambda: 2)
    record = command.record
    monkeypatch.setattr(command, "record", lambda *a: record(*a, make_ranks=TracedRanks))
    path = tmp_path / "trace.json"
    shape = ("--hidden", "128", "--intermediate", "128", "--local-experts", "4", "--top-k", "2")
    options = ("--tokens", "4", "--ranks", "4", "--tile", "1")
    assert main(["timeline", "--out", str(path), *shape, *options]) == 0
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == set(range(4))
    output = capsys.readouterr().out
    assert "4 ranks on 2 GPUs" in output and "tile 1: 1.0 us" in output and "swiglu" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--devices: got 1; expected a machine with an NVIDIA GPU"),
        (("--tokens", "0"), "--tokens: got 0"),
        (("--ranks", "100"), "number of expert-parallel ranks: got 100"),
        (("--hidden", "100"), "hidden: got 100"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, tmp_path, capsys, arguments, words):
    monkeypatch.setattr(gpu_measure, "num_gpus", lambda: 0)
    assert main(["timeline", "--out", str(tmp_path / "trace.json"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_tiles_are_checked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_measure, "num_gpus", lambda: 1)
    out = str(tmp_path / "trace.json")
    assert main(["timeline", "--out", out, "--tile", "5", "--granularity", "32"]) == 2
    assert "--tile: got 5; expected 0 to 4" in capsys.readouterr().err
    assert main(["timeline", "--out", "/no/such/folder/trace.json"]) == 2
    assert "--out: got" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_call_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "trace.json"
    shape = ("--hidden", "256", "--intermediate", "128", "--local-experts", "4", "--top-k", "2")
    options = ("--tokens", "64", "--ranks", "2", "--devices", "1", "--granularity", "row")
    assert main(["timeline", "--out", str(path), *shape, *options]) == 0
    names = {e["name"] for e in intervals(json.loads(path.read_text()))}
    wanted = {"pull", "linear 1", "swiglu", "linear 2", "push", "combine"}
    assert wanted <= names <= set(NAMES)
    assert "linear 2" in capsys.readouterr().out

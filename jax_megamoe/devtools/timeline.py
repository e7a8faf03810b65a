"""The timeline of one call on GPUs, for Perfetto and as a table.

Kernels compiled with a trace (`gpu_harness.GpuRanks(..., trace=True)`) write an interval for each
thing that each role does. `chrome_trace` makes a file of them that ui.perfetto.dev and
chrome://tracing read: a process for each rank, a thread for each (CTA, lane); there is one CTA on
each SM. `summary` condenses them: which role spends how long on what.

GPUs have clocks of their own. Times count from the first interval of each GPU; ranks start
together, within about a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_megamoe._ffi import native
from jax_megamoe.cli.shared import format_table

__all__ = ["LANES", "Timeline", "chrome_trace", "num_dropped", "summary", "summary_table"]

#: Lane of a CTA -> (role, name of the thread): math warpgroups, the loaders, the pull warps.
LANES = (
    *(("math", f"math warpgroup {i}") for i in range(4)),
    ("weight loader", "weight loader"),
    ("activation loader", "activation loader"),
    *(("pull", f"pull warp {i}") for i in range(2)),
)
assert len(LANES) == native.GPU_TRACE_LANES

#: [CTA][lane] -> array of `gpu_harness.TRACE_DTYPE`: what `GpuRanks.trace` returns for one rank.
Timeline = Sequence[Sequence[np.ndarray]]


def _flat(timelines: Sequence[Timeline], devices: Sequence[int]) -> list[np.ndarray]:
    """For each rank, its intervals with their CTA and lane, in nanoseconds from the first one."""
    fields = ("rank", "cta", "lane", "name", "block", "begin", "end")
    dtype = np.dtype([(field, np.int64) for field in fields])
    ranks = []
    for rank, timeline in enumerate(timelines):
        parts, first = [np.zeros(0, dtype)], _first(timelines, devices, rank)
        for cta, lanes in enumerate(timeline):
            for lane, events in enumerate(lanes):
                # One that has no end was open when a call was aborted.
                events = events[events["end"] >= events["begin"]]
                part = np.zeros(len(events), dtype)
                part["rank"], part["cta"], part["lane"] = rank, cta, lane
                part["name"], part["block"] = events["name"], events["block"]
                part["begin"] = events["begin"] - np.uint64(first)
                part["end"] = events["end"] - np.uint64(first)
                parts.append(part)
        ranks.append(np.concatenate(parts))
    return ranks


def _first(timelines, devices, rank) -> int:
    """Begin of the first interval on the GPU of `rank`."""
    begins = [
        int(events["begin"].min())
        for other, timeline in enumerate(timelines)
        if devices[other] == devices[rank]
        for lanes in timeline
        for events in lanes
        if len(events)
    ]
    return min(begins, default=0)


def chrome_trace(timelines: Sequence[Timeline], devices: Sequence[int]) -> dict[str, Any]:
    """The call in Chrome's trace event format.

    Args:
      timelines: of each rank, from `GpuRanks.trace`.
      devices: the GPU of each rank.

    Returns:
      A dict to be written as JSON. Times are microseconds; the argument "block" of an interval is
      the block of the rank's pool that it belongs to.
    """
    events: list[dict[str, Any]] = []
    for rank, flat in enumerate(_flat(timelines, devices)):
        label = {"name": f"rank {rank} on GPU {devices[rank]}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": label})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        )
        for cta, lane in sorted({(int(e["cta"]), int(e["lane"])) for e in flat}):
            tid = cta * len(LANES) + lane
            thread = {"pid": rank, "tid": tid, "ph": "M"}
            name = f"CTA {cta}, {LANES[lane][1]}"
            events.append({**thread, "name": "thread_name", "args": {"name": name}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for event in flat:
            events.append(
                {
                    "ph": "X",
                    "name": native.GPU_TRACE_NAMES[event["name"]],
                    "cat": LANES[event["lane"]][0],
                    "pid": rank,
                    "tid": int(event["cta"]) * len(LANES) + int(event["lane"]),
                    "ts": float(event["begin"] / 1e3),
                    "dur": float((event["end"] - event["begin"]) / 1e3),
                    "args": {"block": int(event["block"])},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def summary(timelines: Sequence[Timeline], devices: Sequence[int]) -> list[dict[str, Any]]:
    """What each role of each rank did, in the order in which it began.

    Returns:
      Dicts: rank, role, name, count, mean_us, median_us, max_us, first_us (its first begin),
      last_us (its last end), busy_us (sum over intervals, divided by the lanes that had any).
    """
    rows = []
    for rank, flat in enumerate(_flat(timelines, devices)):
        roles = np.array([LANES[lane][0] for lane in flat["lane"]])
        for role in dict.fromkeys(name for name, _ in LANES):
            for name in np.unique(flat["name"]):
                part = flat[(roles == role) & (flat["name"] == name)]
                if not len(part):
                    continue
                length = (part["end"] - part["begin"]) / 1e3
                lanes = len(np.unique(part["cta"] * len(LANES) + part["lane"]))
                rows.append(
                    {
                        "rank": rank,
                        "role": role,
                        "name": native.GPU_TRACE_NAMES[name],
                        "count": len(part),
                        "mean_us": float(length.mean()),
                        "median_us": float(np.median(length)),
                        "max_us": float(length.max()),
                        "first_us": float(part["begin"].min() / 1e3),
                        "last_us": float(part["end"].max() / 1e3),
                        "busy_us": float(length.sum() / lanes),
                    }
                )
    return sorted(rows, key=lambda row: (row["rank"], row["first_us"]))


def num_dropped(timelines: Sequence[Timeline]) -> int:
    """Lanes whose buffer was full, so that later intervals of theirs are missing."""
    return sum(
        len(events) >= native.GPU_TRACE_EVENTS
        for timeline in timelines
        for lanes in timeline
        for events in lanes
    )


def summary_table(rows: Sequence[dict[str, Any]]) -> str:
    times = ("mean us", "median us", "max us", "first begin", "last end", "us per lane")
    header = ("rank", "role", "what", "count", *times)
    keys = ("mean_us", "median_us", "max_us", "first_us", "last_us", "busy_us")
    cells = [
        (row["rank"], row["role"], row["name"], row["count"], *(f"{row[key]:.2f}" for key in keys))
        for row in rows
    ]
    return format_table(cells, header, left=3)

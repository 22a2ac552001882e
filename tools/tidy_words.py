"""What tidy refuses in names, and what it says instead. The glossary (docs/glossary.md) explains the words."""

from __future__ import annotations

REFUSED_IN_DEFINITIONS = {
    "manager": "name the noun that it owns (pool, fleet, arena), or it is a coordinator or driver",
    "managers": "name the noun that they own",
    "handler": "name what it does with what it gets (the route's or the event's verb)",
    "handlers": "name what they do with what they get",
    "helper": "name what it does; a function of its caller's file needs no such word",
    "helpers": "name what they do",
    "util": "name the thing that it is about, and put it beside that thing",
    "utils": "name the thing that they are about, and put them beside that thing",
    "base": "name the port that it is (a Protocol), or leave the word out",
    "mixin": "compose: hold the other object and call it",
    "common": "name the thing that it is about",
    "misc": "name the thing that it is about",
}
"""Words that no module, class or function has in its name."""

FINE_TOGETHER = {"base url"}
"""Pairs of words that mean something, though one of them alone is refused."""

REFUSED_ANYWHERE = {
    "instance": "say worker",
    "instances": "say workers",
    "replica": "say worker",
    "replicas": "say workers",
    "iteration": "say step",
    "iterations": "say steps",
    "migration": "say handoff",
    "migrate": "say hand off",
    "migrated": "say handed off",
    "tbt": "say itl (each gap) or tpot (their mean)",
}
"""Words that no name of the product has at all: modules, classes, functions, parameters, fields, variables."""

REFUSED_NEAR_KV = {
    "page": "say block (KV); of the operating system's memory: say so, in the allow-list",
    "pages": "say blocks (KV); of the operating system's memory: say so, in the allow-list",
}
"""As above, in the packages where KV is spoken of: elsewhere a page is something to read."""

NEAR_KV = ("core", "decide", "lab/sim", "move/arena", "move/transport", "move/store", "compute", "serve/worker")

REFUSED_UNITS = {
    "_s": (
        "ms", "msec", "msecs", "milli", "millis", "millisecond", "milliseconds", "us", "usec", "micros",
        "microseconds", "ns", "nanos", "nanoseconds", "sec", "secs", "seconds", "minutes", "hours",
    ),
    "_bytes": ("kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib", "kbytes", "mbytes", "gbytes", "megabytes"),
    "_ratio": ("percent", "percentage", "pct"),
    "_rps": ("qps",),
}  # fmt: skip
"""The unit to use: words that say another one. Held against names of numbers only."""

UNIT_NEEDED = {
    "timeout": "_s",
    "delay": "_s",
    "interval": "_s",
    "duration": "_s",
    "latency": "_s",
    "deadline": "_s",
    "elapsed": "_s",
    "ttl": "_s",
    "ttft": "_s",
    "tpot": "_s",
    "itl": "_s",
    "e2e": "_s",
    "bandwidth": "_bytes_per_s",
}
"""Last words of a number's name that leave its unit open, and the ending that closes it."""

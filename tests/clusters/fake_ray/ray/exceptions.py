from __future__ import annotations


class RayError(Exception):
    pass

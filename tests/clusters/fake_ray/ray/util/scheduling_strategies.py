from __future__ import annotations

from ray.util.placement_group import PlacementGroup


class PlacementGroupSchedulingStrategy:
    def __init__(self, placement_group: PlacementGroup, placement_group_bundle_index: int) -> None:
        assert 0 <= placement_group_bundle_index < len(placement_group.bundles)
        self.group = placement_group

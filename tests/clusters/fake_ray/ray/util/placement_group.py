from __future__ import annotations


class PlacementGroup:
    def __init__(self, bundles: list[dict[str, float]]) -> None:
        self.bundles = bundles
        self.actors: list = []


def placement_group(bundles: list[dict[str, float]], strategy: str, name: str) -> PlacementGroup:
    assert strategy == ("SPREAD" if len(bundles) > 1 else "STRICT_PACK")
    assert name
    return PlacementGroup(bundles)


def remove_placement_group(group: PlacementGroup) -> None:
    for actor in group.actors:
        actor.die()

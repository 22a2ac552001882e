"""The tools of the tests of deploy/."""

from __future__ import annotations

import pytest

from tests.deploy.cluster_tools import ClusterTools, cluster_tools


@pytest.fixture(scope="session")
def tools() -> ClusterTools:
    return cluster_tools()

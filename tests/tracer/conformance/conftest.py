from collections.abc import Iterator

import pytest

from tests.tracer.conformance.running import Player, player_in


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    with player_in(tmp_path_factory.mktemp("conformance")) as player:
        yield player

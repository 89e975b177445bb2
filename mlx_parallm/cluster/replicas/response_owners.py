"""Which replica makes a response in the background: requests for its id go there. No Ray, no network."""

from collections import OrderedDict

import orjson

from mlx_parallm.server.http.route_table import Route

CAPACITY = 10_000  # ids; the oldest are forgotten, and then any replica is asked


class ResponseOwners:
    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()  # by the response's id, the replica's name

    def note(self, route: Route, status: int, body: bytes, replica: str) -> None:
        """A response has come from a replica."""
        if route.replicas != "creates" or status != 200:
            return
        try:
            response = orjson.loads(body)
        except orjson.JSONDecodeError:
            return
        if isinstance(response, dict) and response.get("background") and isinstance(response.get("id"), str):
            self._owners[response["id"]] = replica
            if len(self._owners) > CAPACITY:
                self._owners.popitem(last=False)

    def of(self, route: Route, path: str) -> str | None:
        """The replica that a request for this path should go to, if that matters."""
        parameters = route.parameters(path) if route.replicas == "owner" else None
        return None if not parameters else self._owners.get(parameters["response_id"])

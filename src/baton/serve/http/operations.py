"""The routes with which an operator looks into a running cluster and acts on it."""

from __future__ import annotations

import asyncio
import re
import sys

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import RequestError
from baton.core.types import HostId, RequestId, WorkerId
from baton.move.clock import now_s
from baton.serve.http.edge import read_object
from baton.serve.http.model_services import ModelServices
from baton.serve.http.pages import asked_model, json_response
from baton.serve.http.services import Services
from baton.serve.http.wire.errors import ClusterError
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.responses import CancelResponse, DrainResponse, RestartResponse, RoleResponse, ScaleResponse
from baton.serve.http.wire.schemas import CancelRequest, DrainRequest, RestartRequest, RoleRequest, ScaleRequest
from baton.serve.live.joined_host import JoinedHost
from baton.serve.live.log_thread import LogThread
from baton.serve.live.running import describe_running, find_live

EXPLAIN_S = 60.0
"""Time limit of the replay for one explanation."""
_EXPLAINING = (
    "import os, sys; from baton.move.ipc.child import die_with_parent; die_with_parent(); os.nice(10); "
    "from baton.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,160}")


class Operations:
    """The endpoints. All need the scope `admin`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._explaining = asyncio.Lock()
        """Held by the only replay that may run."""

    def routes(self) -> list[Route]:
        return [
            Route("/cluster/requests", self._requests),
            Route("/cluster/cancel", self._cancel, methods=["POST"]),
            Route("/cluster/workers/{worker}/role", self._set_role, methods=["POST"]),
            Route("/cluster/scale", self._scale, methods=["POST"]),
            Route("/cluster/restart", self._restart, methods=["POST"]),
            Route("/cluster/hosts/{host}/drain", self._drain, methods=["POST"]),
            Route("/cluster/explain/{request}", self._explain),
        ]

    async def _requests(self, request: Request) -> Response:
        return json_response(describe_running(asked_model(self._services, request).gateway.live, now_s()))

    async def _cancel(self, request: Request) -> Response:
        """Cancel every choice of a request. Its client gets an error that it does not retry."""
        asked = convert(await read_object(request), CancelRequest).id
        gateway = asked_model(self._services, request).gateway
        found = find_live(gateway.live, asked)
        if not found:
            message = f"no running request has the id {asked[:160]!r}; GET /cluster/requests lists them"
            raise RequestError(message, param="id", status=404, code="not_found")
        for live in found:
            live.was_cancelled_by_operator = True
            gateway.cancel(live)
        return json_response(CancelResponse(tuple(live.request.id for live in found)))

    async def _set_role(self, request: Request) -> Response:
        body = convert(await read_object(request), RoleRequest)
        worker = request.path_params["worker"]
        asked_model(self._services, request).gateway.fleet.set_role(WorkerId(worker), body.role)
        return json_response(RoleResponse(worker, body.role))

    async def _scale(self, request: Request) -> Response:
        """Set the number of workers of a role. Workers start, or drain and end; `/cluster` shows them."""
        body = convert(await read_object(request), ScaleRequest)
        fleet = asked_model(self._services, request).gateway.fleet
        return json_response(ScaleResponse(dict(fleet.scale(body.role, body.workers))))

    async def _restart(self, request: Request) -> Response:
        """Begin a rolling restart. `/cluster` shows its progress."""
        body = convert(await read_object(request), RestartRequest)
        fleet = asked_model(self._services, request).gateway.fleet
        left = fleet.restart([WorkerId(worker) for worker in body.workers])
        return json_response(RestartResponse(left))

    async def _drain(self, request: Request) -> Response:
        """Ask a joined host to leave. Its agent ends, or starts again, once requests and prefixes are elsewhere."""
        body, host = convert(await read_object(request), DrainRequest), request.path_params["host"]
        why = "an operator restarts it" if body.restart else "an operator drains it"
        joined = _joined_host(asked_model(self._services, request), HostId(host))
        joined.ask_to_leave(why, restarts=body.restart)
        return json_response(DrainResponse(host))

    async def _explain(self, request: Request) -> Response:
        """Return what `baton explain` finds in the decision log about a request."""
        log, asked = asked_model(self._services, request).gateway.decision_log, request.path_params["request"]
        if log is None:
            message = "this server keeps no decision log; start it with --log FILE"
            raise RequestError(message, status=404, code="no_decision_log")
        if not _REQUEST_ID.fullmatch(asked):
            message = f"{asked[:160]!r} is no request id: it has 1 to 160 letters, digits, '.', '_', ':' and '-'"
            raise RequestError(message, status=404, code="not_found")
        if self._explaining.locked():
            message = "another request is being explained; ask again in a moment"
            raise ClusterError(message, status=503, code="busy", retry_after_s=1.0)
        async with self._explaining:
            return Response(await _replay(log, RequestId(asked)), media_type="application/json")


def _joined_host(model: ModelServices, host: HostId) -> JoinedHost:
    """Return a host that has joined. Raises RequestError (404, 409)."""
    members = model.hosts.members
    if host in members:
        return members[host]
    if any(known.id == host for known in model.gateway.cluster().hosts):
        message = f"{host} is the server's own host; end the server to drain it"
        raise RequestError(message, param="host", status=409, code="own_host")
    joined = ", ".join(sorted(members)) or "none"
    raise RequestError(f"no host {host[:80]!r} has joined; joined: {joined}", param="host", status=404)


async def _replay(log: LogThread, request_id: RequestId) -> bytes:
    """Return the explanation as JSON. Raises RequestError if the log does not have the request, or takes too long.

    The log is replayed in another process of low priority, so that no stream waits.
    """
    await asyncio.to_thread(log.flush)
    arguments = ("explain", "--log", str(log.path), "--json", "-", "--", request_id)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _EXPLAINING,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        found, errors = await asyncio.wait_for(process.communicate(), EXPLAIN_S)
    except TimeoutError as error:
        message = f"the decision log was not replayed within {EXPLAIN_S:.0f} s; run baton explain --log FILE instead"
        raise RequestError(message, status=503, code="log_too_long") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RequestError(errors.decode(errors="replace").strip()[:500], status=404, code="not_found")
    return found

"""The check of the auth token, against a server that responds like the head."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from rayzero.orchestrator.cluster import connect, ray_api
from rayzero.orchestrator.cluster.ray_api import AuthRefusedError, check_auth

TOKEN = "a" * 64
LIMIT_S = 20.0


class TokenHandler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        authorization = dict(details.invocation_metadata).get("authorization")

        def respond(_: bytes, context: grpc.ServicerContext) -> bytes:
            if details.method != "/ray.rpc.NodeInfoGcsService/CheckAlive":
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            if authorization != f"Bearer {TOKEN}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(respond)


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[TokenHandler()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(10)


def with_headers(monkeypatch: pytest.MonkeyPatch, **headers: str) -> None:
    """Replace the headers that Ray derives from the environment and caches."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_api, "get_auth_headers_if_auth_enabled", lambda _: headers)


def test_token_is_checked_at_once(head: str, monkeypatch: pytest.MonkeyPatch):
    with_headers(monkeypatch, Authorization=f"Bearer {TOKEN}")
    assert check_auth(head, LIMIT_S)
    start_s = time.monotonic()
    with_headers(monkeypatch)
    with pytest.raises(AuthRefusedError, match="requires an auth token, and none is set"):
        check_auth(head, LIMIT_S)
    with_headers(monkeypatch, Authorization="Bearer b")
    with pytest.raises(AuthRefusedError, match="rejected the auth token") as error:
        connect.connect(head)
    assert "RAY_AUTH_TOKEN_PATH" in str(error.value)
    assert time.monotonic() - start_s < 15, "Ray's own check takes 20 s each"


def test_rejected_token_is_an_error_without_another_local_cluster(
    head: str, monkeypatch: pytest.MonkeyPatch
):
    with_headers(monkeypatch, Authorization="Bearer b")
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {head, "127.0.0.1:1"})
    with pytest.raises(AuthRefusedError):
        list(connect.connect_each(None))

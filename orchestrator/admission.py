"""Whether a cluster lets us in, asked before Ray asks: Ray would repeat a refused question for 20 s
and more, and then say that nobody answers."""

from __future__ import annotations

import os

from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

from rayzero.engine.errors import ConfigError


class RefusedError(ConfigError):
    """A cluster does not let us in."""


_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # an empty message asks about no node
_ANSWER_S = 2.0


def refuse_strangers(address: str) -> None:
    """Asks the head at host:port one small question with the token that Ray would give it. Whatever
    else may be wrong is left to Ray.

    Raises:
        RefusedError: it does not take that token, or that there is none.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    import grpc  # here, because it takes long to import, and `--help` must not wait for it

    headers = get_auth_headers_if_auth_enabled({})
    metadata = tuple((key.lower(), value) for key, value in headers.items())
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return
        else:
            return
    said = "refuses our token" if metadata else "wants a token, and we give none"
    raise RefusedError(
        f"the Ray cluster at {address!r} {said}",
        allowed="the token that its head was started with",
        fix="RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
    )

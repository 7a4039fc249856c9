"""What every HTTP application of ours answers before, and after, anything of its own."""

import asyncio

import pytest


@pytest.mark.parametrize("token", ["token", "another"])
def test_an_error_in_a_route_is_answered_as_a_refusal(token):
    import httpx

    from skyrl_megatron.inference.http_guard import guarded

    app = guarded("token")

    @app.get("/engines")
    async def engines():
        raise ZeroDivisionError("a secret")

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.get("/engines", headers={"Authorization": f"Bearer {token}"})

    answer = asyncio.run(ask())
    assert answer.status_code == (500 if token == "token" else 401)
    said = answer.json()["error"]
    assert said["code"] == answer.status_code and "a secret" not in said["message"]
    assert ("ZeroDivisionError" in said["message"]) == (token == "token")

"""`GET /v1/models`: every name that can be asked for, adapters as `base:adapter`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from orchard.serve.hub import Card
from orchard.serve.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["models"])
    since = int(time.time())

    def shown(card: Card) -> dict[str, Any]:
        known = {"id": card.id, "object": "model", "created": since, "owned_by": "orchard"}
        more = {"loaded": card.loaded, "base": card.base, "context": card.context, "kind": card.kind}
        return known | {"orchard": more}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for."""
        found = await service.helped(service.hub.cards)
        return {"object": "list", "data": [shown(card) for card in found]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return shown(await service.helped(lambda: service.hub.card(name)))

    return routes

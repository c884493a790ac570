"""To come."""

from __future__ import annotations

from fastapi import APIRouter

from orchard.serve.service import Service


def router(service: Service) -> APIRouter:
    return APIRouter()

"""Several copies of the server behind one door, on Ray Serve: `orchard serve --replicas N --cluster`.

    client ── HTTP ──> front (this process: uvicorn, security, a sticky choice) ── Ray ──> replica 0 … N-1 (the same app)

The front reads a request, works out where its beginning was read before, and hands it to that replica; the replica calls the
very app of the single server in its own process and streams the messages of its answer back.

**Every replica is a Ray Serve application of its own, with one replica.** Ray Serve has three other ways, and each lacks
something that is needed here. A custom request router sees the choice but not the outcome: a request cannot be sent again to
a *named* other replica, and its interface is marked alpha. Multiplexed model ids are a cache of models with an eviction
order, not of prompts. Ray's own prefix router belongs to its package for vLLM. With one application per replica there is a
stable handle per replica, so that the front knows where each request is, bounds each queue, reads each replica's metrics and
sees each one die and come back, and Ray Serve still does what it is good at: placing replicas on nodes, checking their
health, starting dead ones again. It costs Ray's own autoscaling, which is not offered.

`sticky` is the choice, `fleet` what is known of the replicas, `forward` one request on its way, `front` the ASGI app,
`replica` what runs in Ray, `rays` and `ray_link` the only files that import Ray, `run` puts them together. Everything but
`rays` and `ray_link` is tested without Ray.
"""

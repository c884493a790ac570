"""What the front counts, and the metrics of all replicas on one page with a label that says whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orchard.serve.cluster.fleet import Fleet


class Gauges:
    """The front's own counters, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.registry = CollectorRegistry()
        prefix = "orchard_cluster_"
        self.requests = self._counter(prefix + "requests", "Requests sent to a replica.", ["replica"])
        self.sticky = self._counter(
            prefix + "sticky",
            "Where requests went: home (to the replica of their beginning), away (that one was busy), none (no beginning).",
            ["outcome"],
        )
        self.retries = self._counter(prefix + "retries", "Requests sent again because their replica was lost.")
        self.lost = self._counter(prefix + "streams_lost", "Streams that broke off because their replica was lost.")
        self.gone = self._counter(prefix + "clients_gone", "Requests whose client hung up before the answer ended.")
        self.refused = self._counter(prefix + "refused", "Requests that the front answered with an error.", ["code"])
        self.registry.register(self)

    def _counter(self, name: str, words: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, words, labels, registry=self.registry)

    def sent(self, replica: str, has_key: bool, home: bool) -> None:
        self.requests.labels(replica).inc()
        self.sticky.labels(("home" if home else "away") if has_key else "none").inc()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry: what the fleet knows right now."""
        up = GaugeMetricFamily("orchard_cluster_replica_up", "Whether a replica is ready.", labels=["replica"])
        running = GaugeMetricFamily(
            "orchard_cluster_replica_running", "Requests that a replica has.", labels=["replica"]
        )
        restarts = CounterMetricFamily(
            "orchard_cluster_replica_restarts", "Times a replica came back.", labels=["replica"]
        )
        for name, member in self._fleet.members.items():
            up.add_metric([name], float(member.state == "ready"))
            running.add_metric([name], member.running)
            restarts.add_metric([name], member.restarts)
        return up, running, restarts

    def text(self) -> str:
        return generate_latest(self.registry).decode()


@dataclass
class _Family:
    comments: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged(pages: Mapping[str, str]) -> str:
    """The pages of several replicas (name → text) as one: every sample with `replica="name"`, every family once."""
    families: dict[str, _Family] = {}
    for replica, page in pages.items():
        current = families.setdefault("", _Family())
        first = False
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                first = name not in families or (first and current is families[name])
                current = families.setdefault(name, _Family())
                if first:
                    current.comments.append(line)
            elif line and not line.startswith("#"):
                current.samples.append(labelled(line, replica))
    lines = [line for family in families.values() for line in (*family.comments, *family.samples)]
    return "".join(f"{line}\n" for line in lines)


def labelled(sample: str, replica: str) -> str:
    """A line of the text format with one label more."""
    label = 'replica="{}"'.format(replica.replace("\\", r"\\").replace('"', r"\""))
    brace, space = sample.find("{"), sample.find(" ")
    if brace == -1 or (space != -1 and space < brace):
        return f"{sample[:space]}{{{label}}}{sample[space:]}"
    rest = sample[brace + 1 :].lstrip(" ,")
    return f"{sample[:brace]}{{{label}{'' if rest.startswith('}') else ','}{rest}"

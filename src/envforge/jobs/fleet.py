"""Several images, several kinds of nodes: which image runs where, and why it does not elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envforge.inventory import FEATURES
from envforge.resolver.hosts import covers, key

if TYPE_CHECKING:
    from envforge.resolver.hosts import Host


@dataclass(frozen=True, slots=True)
class Needs:
    """What an image asks of a node: variant, lowest driver, compute capabilities that it was planned for, arch."""

    variant: str | None = None
    driver_floor: str | None = None
    sms: tuple[str, ...] = ()
    arch: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one image, and how a scheduler finds them: a feature that they all and no others have, or None."""

    image: int  # position in the list of images
    hosts: tuple[str, ...]
    feature: str | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Groups, one per image that is used; hosts that no image covers with the reasons; every host's name."""

    groups: tuple[Group, ...]
    uncovered: tuple[tuple[str, str], ...]
    names: tuple[str, ...]

    def others(self, group: Group) -> tuple[str, ...]:
        """Nodes that must not take part in the group's job: two images never meet in one."""
        return tuple(name for name in self.names if name not in group.hosts)


def misfit(needs: Needs, host: Host) -> str:
    """Why an image does not run on a host, "" where it does. What runs on sm_80 runs on later ones of that major."""
    if needs.arch and host.arch != needs.arch:
        return f"it is {host.arch}, the image is for {needs.arch}"
    if needs.variant == "cpu":
        return ""
    if not host.has_gpu:
        return f"it has no GPU, the image is for {needs.variant or 'CUDA'}"
    if needs.driver_floor and host.driver and key(host.driver) < key(needs.driver_floor):
        return f"driver {host.driver} is older than {needs.driver_floor}"
    for sm in sorted({gpu.sm for gpu in host.gpus if gpu.sm}):
        if needs.sms and covers(needs.sms, (), sm, False) is None:
            planned = ", ".join(f"sm_{one.replace('.', '')}" for one in needs.sms)
            return f"its GPU is sm_{sm.replace('.', '')}, the image was planned for {planned}"
    return ""


def assign(images: Sequence[Needs], hosts: Iterable[Host]) -> Fleet:
    """Every host goes to the first image that runs on it: name the preferred image first."""
    hosts = list(hosts)
    mine: dict[int, list[Host]] = {}
    uncovered = []
    for host in hosts:
        reasons = []
        for position, needs in enumerate(images):
            reason = misfit(needs, host)
            if not reason:
                mine.setdefault(position, []).append(host)
                break
            reasons.append(reason)
        else:
            uncovered.append((host.name, "; ".join(dict.fromkeys(reasons))))
    groups = []
    for position, group in sorted(mine.items()):
        others = [host for host in hosts if host not in group]
        groups.append(Group(position, tuple(host.name for host in group), _feature(group, others)))
    return Fleet(tuple(groups), tuple(uncovered), tuple(host.name for host in hosts))


def _feature(group: list[Host], others: list[Host]) -> str | None:
    """A feature of all of these and of none of those: the scheduler's own word for the group."""
    common = set.intersection(*(_features(host) for host in group))
    for host in others:
        common -= _features(host)
    return min(common, default=None)


def _features(host: Host) -> set[str]:
    return {word for word in host.labels.get(FEATURES, "").split(",") if word}

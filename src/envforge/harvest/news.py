"""Says in plain words what a harvest brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envforge.matrix.releases import Release


def news(name: str, old: Sequence[Release], new: Sequence[Release], packages: Iterable[str]) -> list[str]:
    """One sentence per change: new, gone and yanked releases, and the ranges on `packages` that changed with them.

    A first harvest (`old` empty) is one sentence.
    """
    if not old:
        return [f"{name}: {len(new)} releases, {new[0].version} to {new[-1].version}"] if new else []
    known = {release.version: release for release in old}
    current = {release.version for release in new}
    out = []
    for at, release in enumerate(new):
        before = known.get(release.version)
        if before is None:
            out.append(_arrival(name, release, _predecessor(new, at), set(packages)))
        elif before != release:
            out += [f"{name} {release.version}: {text}" for text in _changes(before, release, set(packages))]
    out += [f"{name} {version}: gone from the index" for version in known if version not in current]
    return out


def _predecessor(releases: Sequence[Release], at: int) -> Release | None:
    from packaging.version import Version

    for release in reversed(releases[:at]):
        if not release.yanked and not Version(release.version).is_prerelease:
            return release
    return None


def _arrival(name: str, release: Release, before: Release | None, packages: set[str]) -> str:
    text = f"{name} {release.version}: new, {release.uploaded}"
    if release.yanked:
        text += ", yanked"
    if release.requires_from == "unknown":
        return f"{text}; its requirements are not declared"
    changes = _range_changes(before, release, packages)
    return text + (("; " + "; ".join(changes)) if changes else "")


def _changes(before: Release, release: Release, packages: set[str]) -> list[str]:
    out = []
    if before.yanked != release.yanked:
        out.append("yanked" if release.yanked else "no longer yanked")
    out += _range_changes(before, release, packages)
    added = sorted(set(release.wheels) - set(before.wheels))
    removed = sorted(set(before.wheels) - set(release.wheels))
    if added:
        out.append(f"new wheels: {', '.join(added)}")
    if removed:
        out.append(f"wheels gone: {', '.join(removed)}")
    return out or ["details changed (upload date, size or lines on packages outside the matrix)"]


def _range_changes(before: Release | None, release: Release, packages: set[str]) -> list[str]:
    out = []
    was, now = (_ranges(before, packages) if before else {}), _ranges(release, packages)
    if before is None or before.python != release.python:
        out.append(f"needs python {release.python or 'of any version'}")
    for package in sorted(now):
        if now[package] != was.get(package):
            earlier = f" (was {was[package]})" if package in was else ""
            out.append(f"needs {package} {now[package]}{earlier}")
    if before is not None:
        out += [f"no longer needs {package}" for package in sorted(was.keys() - now.keys())]
    return out


def _ranges(release: Release, packages: set[str]) -> dict[str, str]:
    """Package -> its range in words, for requirements outside extras; several lines are joined with their markers."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, list[str]] = {}
    for line in release.requires:
        requirement = Requirement(line)
        package = canonicalize_name(requirement.name)
        marker = str(requirement.marker or "")
        if package not in packages or "extra ==" in marker:
            continue
        specifier = ",".join(sorted(map(str, requirement.specifier), reverse=True)) or "of any version"
        found.setdefault(package, []).append(specifier + (f" where {marker}" if marker else ""))
    return {package: " or ".join(parts) for package, parts in found.items()}

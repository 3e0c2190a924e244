"""What a release says of itself: its bill of materials, its version and its changelog; its container and compose files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

import penstock
from tests import ROOT


def requirements(name, extras=()):
    """The distributions that pip installs for this one, here."""
    packaging = pytest.importorskip("packaging.requirements")
    for line in metadata.requires(name) or ():
        requirement = packaging.Requirement(line)
        contexts = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker is None or any(requirement.marker.evaluate(context) for context in contexts):
            yield requirement.name.lower().replace("_", "-"), tuple(requirement.extras)


def closure(roots):
    found, waiting = set(), list(roots)
    while waiting:
        name, extras = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += requirements(name, extras)
    return found


def test_the_bill_of_materials_has_all_that_pip_installs_with_its_hashes(tmp_path):
    file = tmp_path / "sbom.json"
    subprocess.run(
        [sys.executable, str(ROOT / "ops" / "sbom.py"), str(file)], check=True, capture_output=True
    )
    bill = json.loads(file.read_text())
    named = {component["name"] for component in bill["components"]}

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == penstock.__version__
    assert closure(requirements("penstock", ("jobs", "postgres"))) <= named
    assert {"preact", "uplot"} <= named
    assert all(component["hashes"] for component in bill["components"])


def test_the_version_has_a_dated_section_of_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")

    assert re.search(rf"^## {re.escape(penstock.__version__)} - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)


def test_the_project_has_classifiers_for_every_python_that_it_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert project["requires-python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        project["classifiers"]
    )


def core_metadata(folder, **env):
    """The metadata of a wheel, as a build frontend asks the backend for it."""
    program = f"import hatchling.build as b; print(b.prepare_metadata_for_build_wheel({str(folder)!r}))"
    env = {name: value for name, value in os.environ.items() if name != "PENSTOCK_HOMEPAGE"} | env
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    return done, [file.read_text("utf-8") for file in folder.glob("*.dist-info/METADATA")]


def test_a_release_names_the_urls_of_its_homepage_and_another_build_names_none(tmp_path):
    released, plain = tmp_path / "released", tmp_path / "plain"
    released.mkdir()
    plain.mkdir()
    _, [with_home] = core_metadata(released, PENSTOCK_HOMEPAGE="https://forge.example/team/penstock/")
    _, [without] = core_metadata(plain)
    home = "https://forge.example/team/penstock"
    urls = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", with_home, re.MULTILINE))

    assert urls == {
        "Homepage": home,
        "Documentation": f"{home}/blob/HEAD/docs/README.md",
        "Source": home,
        "Changelog": f"{home}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    assert all((ROOT / url.partition("/HEAD/")[2]).exists() for url in urls.values())
    assert "\nProject-URL: " not in without


def test_a_release_refuses_a_homepage_that_is_no_address(tmp_path):
    refused, written = core_metadata(tmp_path, PENSTOCK_HOMEPAGE="forge.example/penstock")

    assert refused.returncode != 0
    assert "PENSTOCK_HOMEPAGE is 'forge.example/penstock'; it must be https://HOST/PATH" in refused.stderr
    assert written == []


def test_the_image_has_a_user_without_rights_a_health_check_and_no_pip():
    text = (ROOT / "ops" / "Containerfile").read_text("utf-8")
    last = text.rpartition("\nFROM ")[2]

    assert re.search(r"^USER 10001$", last, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .* CMD \["penstock", "capacity", "--json"\]$', last, re.MULTILINE)
    assert "pip uninstall --yes pip" in text


def test_the_compose_file_names_settings_that_exist():
    settings = set(
        re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "settings.md").read_text("utf-8"), re.MULTILINE)
    )
    variables = {f"PENSTOCK_{name.replace('.', '_').upper()}" for name in settings}
    compose = (ROOT / "ops" / "compose.yml").read_text("utf-8")
    used = set(re.findall(r"^ +(PENSTOCK_\w+):", compose, re.MULTILINE))

    assert used == {"PENSTOCK_DATABASE", "PENSTOCK_HOST_NAME"}
    assert used <= variables
    assert "password@" not in compose


def test_the_compose_file_follows_the_rules_of_the_specification():
    """The rules that a wrong file breaks: known keys, and every name that a service uses is declared."""
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((ROOT / "ops" / "compose.yml").read_text("utf-8"))
    services = compose["services"]
    known = {
        "image", "build", "entrypoint", "environment", "secrets", "volumes", "depends_on", "restart", "read_only",
        "tmpfs", "cap_drop", "security_opt", "stop_grace_period", "healthcheck",
    }  # fmt: skip

    assert set(compose) == {"services", "secrets", "volumes"}
    for name, service in services.items():
        assert set(service) <= known, name
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(compose["volumes"])
        assert set(service.get("depends_on", ())) <= set(services)
        assert service.get("restart", "no") in ("no", "always", "on-failure", "unless-stopped")
        for parent, rule in service.get("depends_on", {}).items():
            assert rule["condition"] != "service_healthy" or "healthcheck" in services[parent]
    for name in ("one", "two"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["environment"]["PENSTOCK_HOST_NAME"] == name
    assert services["one"]["volumes"] != services["two"]["volumes"]

"""docs/releases.md: what it tells to set changes what is served."""

import itertools
import re
import shlex
import textwrap

import pytest
import yaml


@pytest.fixture(scope="module")
def page(chart) -> str:
    return (chart / "docs" / "releases.md").read_text()


@pytest.fixture
def template(call_helm, chart):
    """Renders a case of ci/ as the release that is named."""

    def template(release, case, *options):
        done = call_helm("template", release, str(chart), f"--values={chart}/ci/{case}-values.yaml", *options)
        assert done.returncode == 0, done.stderr
        return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]

    return template


def test_its_commands_serve_another_folder(page, template):
    commands = re.findall(r"^    (helm (?:upgrade|install) (?:.*\\\n)*.*)", page, re.M)
    served = {}
    for _, _, release, _, *words in map(shlex.split, commands):
        options = [word for pair in itertools.pairwise(words) if pair[0].startswith("--set") for word in pair]
        (deployment,) = (m for m in template(release, "cpu", *options) if m["kind"] == "Deployment")
        mounts = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        served[release] = [mount["subPath"] for mount in mounts if mount["name"] == "models"]
    assert served == {"speech": ["releases/2026-11-21"], "speech-canary": ["releases/2026-12-01"]}


def test_its_canary_leaves_with_the_first_release_what_only_one_may_have(page, template):
    (command,) = re.findall(r"^    (helm install speech-canary (?:.*\\\n)*.*)", page, re.M)
    options = [w for pair in itertools.pairwise(shlex.split(command)) if pair[0].startswith("--set") for w in pair]
    own = ("modelRepository.source=pvc", "modelRepository.pvc.claimName=models", "fullnameOverride=speech")
    given = [f"--set={value}" for value in (*own, "service.annotations.example\\.com/address=a")]
    first, canary = template("speech", "closed", *given), template("canary", "closed", *given, *options)
    names = [{(m["kind"], m["metadata"]["name"]) for m in manifests} for manifests in (first, canary)]
    assert not names[0] & names[1]
    (service,) = (m for m in canary if (m["kind"], m["metadata"]["name"]) == ("Service", "canary-carnelian"))
    assert service["spec"]["type"] == "ClusterIP"
    assert "annotations" not in service["metadata"]
    assert not {"loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy"} & service["spec"].keys()


def test_its_route_replaces_the_releases_own_and_leads_to_both(page, tmp_path, template):
    """Of two routes for a host name and a method the older would get everything."""
    (values,) = re.findall(r"^    gateway: .*\n(?:    .*\n)+", page, re.M)
    (tmp_path / "route.yaml").write_text(textwrap.dedent(values))
    first = template("speech", "google", f"--values={tmp_path}/route.yaml")
    second = template("speech-canary", "google")
    (shared,), (own,) = ([m["spec"] for m in ms if m["kind"] == "GRPCRoute"] for ms in (first, second))
    assert [shared[name] for name in ("parentRefs", "hostnames")] == [own[name] for name in ("parentRefs", "hostnames")]
    (rule,) = shared["rules"]
    assert rule["matches"] == own["rules"][0]["matches"]
    weights = {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}
    assert weights == {"speech-carnelian": 95, "speech-canary-carnelian": 5}
    services = {m["metadata"]["name"]: m["spec"]["ports"] for m in (*first, *second) if m["kind"] == "Service"}
    for backend in rule["backendRefs"]:
        assert backend["port"] in [port["port"] for port in services[backend["name"]]]


@pytest.mark.parametrize(
    ("source", "case", "release"),
    [
        ("image", "default", {"image.tag": "0.2.0"}),
        ("image", "cpu", {"image.digest": "sha256:" + "1" * 64}),
        ("pvc", "cpu", {"modelRepository.pvc.subPath": "releases/2"}),
        ("bucket", "bucket", {"modelRepository.bucket.url": "s3://speech-models/2"}),
        (
            "download",
            "download",
            {"modelRepository.download.url": "https://a/2", "modelRepository.download.sha256": "f" * 64},
        ),
    ],
)
def test_its_table_names_the_values_of_each_source(source, case, release, page, render):
    (values,) = re.findall(rf"^\| `{source}` \|[^|]*\| (.*) \|$", page, re.M)
    assert release.keys() <= set(re.findall(r"`([\w.]+)`", values))
    pod = str(render(*(f"{name}={value}" for name, value in release.items()), case=case).pod)
    assert all(value in pod for value in release.values())

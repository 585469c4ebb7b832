"""values.yaml and values.schema.json: complete, closed, and what they refuse."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def schema(chart):
    return json.loads((chart / "values.schema.json").read_text())


def leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{path}{key}", value
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in schema.get("properties", {}).items():
        yield f"{path}{key}", value
        yield from properties(value, f"{path}{key}.")


def test_every_property_has_a_default(chart, schema):
    values = dict(leaves(yaml.safe_load((chart / "values.yaml").read_text())))
    # Kubernetes' own fields may be added to these.
    own = {
        path
        for path, _ in properties(schema)
        if not path.startswith(("podSecurityContext.", "securityContext.", "affinity."))
    }
    assert own <= values.keys()


def test_no_object_of_the_schema_is_open(schema):
    for path, value in properties(schema):
        if "properties" in value:
            assert value["additionalProperties"] is False, path


def test_nothing_that_is_needed_can_be_taken_away(chart, schema, refusal):
    """Templates read it; null would leave a hole in a manifest, or end in a template's error."""
    values = dict(leaves(yaml.safe_load((chart / "values.yaml").read_text())))
    for path, value in [("", schema), *properties(schema)]:
        if "properties" in value and not path.startswith(("podSecurityContext", "securityContext", "affinity")):
            inner = value["properties"]
            defaults = {name: values[f"{path}.{name}".lstrip(".")] for name in inner}
            sections = {name for name in inner if "properties" in inner[name]} - {"affinity"}
            optional = {name for name in inner if {"type": "null"} in inner[name].get("anyOf", [])}
            scalars = {name for name in inner if isinstance(defaults[name], bool | int | float | str)} - optional
            assert sections | {name for name in scalars if defaults[name] != ""} <= set(value.get("required", ())), path
    assert "updateStrategy is required" in refusal("updateStrategy=null")
    assert "grid is required" in refusal("perf.grid=null")
    assert "name is required" in refusal("model.name=null")


def test_a_key_without_a_value_is_as_empty_as_its_default(chart, tmp_path, call_helm):
    """Such as `commonLabels:` with nothing but comments below it."""

    def empty(values):
        return {
            key: empty(value) if isinstance(value, dict) and value else None
            for key, value in values.items()
            if value in ("", [], {}) or (isinstance(value, dict) and empty(value))
        }

    nothing = {"values": empty(yaml.safe_load((chart / "values.yaml").read_text())), "defaults": {}}
    more = ("autoscaling.mode=hpa", "networkPolicy.enabled=true")
    more += ("training.enabled=true", "training.claimName=speech", "perf.enabled=true", "monitoring.rules.enabled=true")
    more += ("monitoring.podMonitor.enabled=true", "monitoring.dashboard.enabled=true")
    rendered = {}
    for name, values in nothing.items():
        (tmp_path / name).write_text(yaml.safe_dump(values))
        files = [f"--values={tmp_path / name}", *(f"--set={value}" for value in more)]
        done = call_helm("template", "speech", str(chart), *files)
        assert done.returncode == 0, done.stderr
        rendered[name] = re.sub(r"\n  key: \S+", "", done.stdout)  # made up anew by each rendering
    assert rendered["values"] == rendered["defaults"]


def test_a_long_time_stays_a_whole_number(chart, tmp_path, call_helm):
    """Helm reads the numbers of a file as floats, which Go writes as 1.2096e+06."""
    two_weeks_s = 14 * 24 * 3600
    training = {"enabled": True, "claimName": "speech", "deadlineSeconds": two_weeks_s}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"training": training}))
    done = call_helm("template", "speech", str(chart), f"--values={tmp_path}/values.yaml")
    assert f"activeDeadlineSeconds: {two_weeks_s}\n" in done.stdout, done.stderr


def test_the_platform_may_choose_the_user(render):
    """As OpenShift does: what is null is left out."""
    context = render("podSecurityContext.runAsUser=null", "podSecurityContext.fsGroup=null").pod["securityContext"]
    assert "runAsUser" not in context
    assert context["runAsNonRoot"] is True


def test_every_value_is_commented(chart):
    lines = (chart / "values.yaml").read_text().splitlines()
    for previous, line in itertools.pairwise(lines):
        key, colon, rest = line.partition(":")
        is_value = colon and not key.strip().startswith(("#", "-")) and rest.strip()
        inside = key.startswith(" ") and not previous.strip().startswith("# --")
        if is_value and not (inside and key.strip() in ("cpu", "memory", "topologyKey", "whenUnsatisfiable")):
            assert previous.strip().startswith("#"), f"{line!r} needs a comment"


@pytest.mark.parametrize(
    ("typo", "named"),
    [
        ("replicaCount=2", "replicaCount"),
        ("image.tags=1", "tags"),
        ("server.thread=2", "thread"),
        ("probes.startup.timeout=3", "timeout"),
        ("podDisruptionBudget.maxUnavailabel=1", "maxUnavailabel"),
        ("updateStrategy.maxSurg=1", "maxSurg"),
        ("securityContext.readOnlyRootFileSystem=false", "readOnlyRootFileSystem"),
        ("affinity.nodeAfinity.a=b", "nodeAfinity"),
        ("tolerations[0].efect=NoSchedule", "efect"),
        ("extraEnv[0].nam=A", "nam"),
        ("topologySpreadConstraints[0].maxSkw=1", "maxSkw"),
    ],
)
def test_a_typo_is_refused_by_name(typo, named, helm, refusal):
    assert named in refusal(typo, helm=helm)


@pytest.mark.parametrize(
    "wrong",
    [
        "replicas=two",
        "replicas=-1",
        "image.tag=latest",
        "image.tag=latest-cpu",
        "image.repository=registry.example.com/carnelian-serving:latest",
        "nameOverride=Speech Service",
        "fullnameOverride=2speech",
        "restrictedProtocols.closed={health}",
        "image.digest=sha256:1234",
        "image.pullPolicy=Sometimes",
        "runtime=docker",
        "service.grpcPort=70000",
        "service.type=ExternalName",
        "service.externalTrafficPolicy=local",
        "service.ipFamilyPolicy=DualStack",
        "service.ipFamilies={ipv4}",
        "server.threads=-1",
        "server.logLevel=debug",
        "server.extraArgs={verbose}",
        "modelRepository.path=models",
        "updateStrategy.maxUnavailable=101%",
        "podDisruptionBudget.maxUnavailable=0",
        "podDisruptionBudget.maxUnavailable=-3",
        "drain.timeoutSeconds=0",
        "resources.limits.memory=3 gigabytes",
        "resources.limits.memory=512m",  # half a byte
        "resources.requests.cpu=1k",
        "tmpSize=lots",
        "tmpSize=256m",
        "model.name=a b",
        "monitoring.thresholds.errorRatio=5",  # percent
        "monitoring.thresholds.rejectedRatio=1.0",  # no share is above it
        "monitoring.thresholds.padding=0.5",
        "test.maxCharacterErrorRate=50",
        "test.maxCharacterErrorRate=1",  # silence has it
    ],
)
def test_a_value_that_cannot_work_is_refused(wrong, refusal):
    assert wrong.split("=")[0].split(".")[0] in refusal(wrong)


def test_an_old_kubernetes_is_refused(helm, refusal):
    assert "1.27" in refusal(kube_version="1.26.0", helm=helm)


@pytest.mark.parametrize("value", ["image.repository=localhost:5000/speech/carnelian", "image.tag=main-3f2a1c"])
def test_an_image_that_stays_the_same_is_taken(value, render):
    assert value.split("=")[1] in render(value).server["image"]


@pytest.mark.parametrize("value", ["0.50", "0.7", ".05", "0.999"])
def test_a_share_is_taken_as_set_writes_it(value, render):
    (container,) = render(f"test.maxCharacterErrorRate={value}").one("Pod")["spec"]["containers"]
    assert f"--max-cer={value}" in container["args"]


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (("gpu.count=1",), "set runtime: native"),
        (("modelRepository.source=pvc",), "name the claim"),
        (("model.load={other}",), "add it"),
        (("resources.requests.memory=9Gi",), 'is "9Gi", above resources.limits.memory, '),
        (("resources.requests.memory=8388608Ki",), 'is "8388608Ki", above resources.limits.memory, '),
        (("resources.limits.ephemeral-storage=256Mi",), 'is "256Mi", but tmpSize, 256Mi, may be used of it'),
        (
            (
                "resources.limits.ephemeral-storage=4Gi",
                "modelRepository.source=download",
                "modelRepository.download.url=https://a/b.tar",
                f"modelRepository.download.sha256={'f' * 64}",
            ),
            "tmpSize, 256Mi, and modelRepository.download.size, 4Gi, may be used of it",
        ),
        (("resources.limits.cpu=1500m",), 'is "2", above resources.limits.cpu, "1500m"; change one'),
        (("resources.limits.cpu=0",), 'is "2", above resources.limits.cpu, 0; change one'),
        (("perf.resources.requests.cpu=3", "perf.resources.limits.cpu=2.5"), "is 3, above perf.resources.limits.cpu"),
        (("updateStrategy.maxSurge=0",), "raise one"),
        (("updateStrategy.maxSurge=0%", "updateStrategy.maxUnavailable=0%"), "raise one"),
        (("probes.startup.timeoutSeconds=900",), "raise it"),
        (("drain.connectionAgeSeconds=44",), "make it smaller"),
        (("drain.delaySeconds=0",), "make it smaller"),
        (("service.grpcPort=8000",), "give each its own"),
        (("autoscaling.mode=hpa", "autoscaling.cpuPercent=80", "resources.requests.cpu=null"), "set it"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_advice(values, advice, refusal):
    assert advice in refusal(*values)


def test_ephemeral_storage_may_hold_the_volumes(render):
    assert render("resources.limits.ephemeral-storage=1Gi").server["resources"]["limits"]["ephemeral-storage"] == "1Gi"
    # The pod's limit is the sum of all containers'.
    assert render("resources.limits.ephemeral-storage=256Mi", "extraContainers[0].name=side").server


def test_the_sizes_are_those_that_were_measured(chart):
    """As shipped, without a queue delay: a row of the table that `carnelian-perf batching` writes."""
    results = Path(__file__).parents[2] / "perf" / "results" / "quartznet_demo_batching.md"
    (row,) = re.findall(r"^\| \*{0,2}\(c\) ragged, as shipped\*{0,2} \| 0 ms \|(.*)\|$", results.read_text(), re.M)
    clips_per_s, rtfx, p50_ms, p95_ms, *_ = (cell.strip(" *") for cell in row.split("|"))
    wanted = f"| {rtfx} | {clips_per_s} | {p50_ms}, {p95_ms} |"
    assert wanted in (chart / "docs" / "sizing.md").read_text(), f"sizing.md must say {wanted}, as {results.name} does"


def named(manifest: Any) -> Iterator[tuple[str, Any]]:
    """Every field that holds a name."""
    if isinstance(manifest, dict):
        for key, value in manifest.items():
            if key in ("name", "namespace", "subPath", "app.kubernetes.io/instance") or key.endswith("Name"):
                yield key, value
            yield from named(value)
    elif isinstance(manifest, list):
        for item in manifest:
            yield from named(item)


def test_a_checksum_of_digits_stays_text(chart, tmp_path, call_helm):
    download = {"url": "https://models.example.com/a.tar", "sha256": "12" * 32}
    values = {"modelRepository": {"source": "download", "download": download}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = call_helm("template", "speech", str(chart), "--values", str(tmp_path / "values.yaml"))
    (deployment,) = (m for m in yaml.safe_load_all(done.stdout) if m and m["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["initContainers"][0]["args"][1] == "12" * 32


def test_names_of_digits_stay_text(chart, tmp_path, call_helm):
    values = {
        "modelRepository": {"source": "pvc", "pvc": {"claimName": "1", "subPath": "20261121"}},
        "tls": {"secretName": "2"},
        "priorityClassName": "3",
        "runtimeClassName": "4",
        "serviceAccount": {"create": False, "name": "5"},
        "restrictedProtocols": {"existingSecret": "6"},
        "ingress": {"className": "7", "grpc": {"enabled": True, "host": "a.example.com", "tlsSecretName": "8"}},
        "training": {"enabled": True, "claimName": "9"},
        "fullnameOverride": "speech",
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = call_helm("template", "10", str(chart), "--namespace", "11", "--values", str(tmp_path / "values.yaml"))
    assert done.returncode == 0, done.stderr
    found = [pair for manifest in yaml.safe_load_all(done.stdout) for pair in named(manifest)]
    assert [pair for pair in found if not isinstance(pair[1], str)] == []
    assert {str(number) for number in range(1, 12)} <= {value for _, value in found}

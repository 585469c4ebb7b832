"""Every case of ci/: both Helms, the schemas of three Kubernetes versions, the rules that only an API server checks."""

import re
import shutil
import tarfile
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

KUBE_VERSIONS = ("1.27", "1.33", "1.37")
STANDARD_LABELS = {
    "helm.sh/chart",
    *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "version", "component", "part-of", "managed-by")),
}
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
# Resources whose schemas are not Kubernetes' own; the tests of their templates look at their fields.
CUSTOM_GROUPS = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io")

Manifest = dict[str, Any]


@pytest.fixture
def pods(case_manifests) -> list[Manifest]:
    """Every pod template of the case."""
    found = [m["spec"]["template"] for m in case_manifests if m["kind"] in ("Deployment", "StatefulSet", "Job")]
    return found + [m for m in case_manifests if m["kind"] == "Pod"]


def containers(pod: Manifest) -> Iterator[Manifest]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def is_ours(container: Manifest) -> bool:
    """Whether the chart, not the user, describes the container."""
    return container["name"] not in ("sidecar", "wait")


def test_lint_is_strict(case, chart, call_helm):
    done = call_helm("lint", "--strict", str(chart), "--values", str(chart / "ci" / f"{case}-values.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_helms_render_the_same(case, render):
    def by_name(helm):
        manifests = render(case=case, helm=helm).manifests
        for secret in manifests:
            if secret["kind"] == "Secret":
                secret.pop("data")  # made up anew by each rendering
        return sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))

    assert by_name("helm3") == by_name("helm4")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
def test_kubernetes_knows_every_field(case, kube_version, render):
    manifests = render(case=case, kube_version=f"{kube_version}.0").manifests
    assert manifests
    for manifest in manifests:
        if manifest["apiVersion"].partition("/")[0] not in CUSTOM_GROUPS:
            # Raises for a removed API version as well as for a wrong or unknown field.
            kubernetes_validate.validate(manifest, kube_version, strict=True)


def test_names_and_labels_are_legal(case_manifests):
    for manifest in case_manifests:
        metadata = manifest["metadata"]
        assert DNS_LABEL.fullmatch(metadata["name"])
        assert all(LABEL_VALUE.fullmatch(value) for value in metadata.get("labels", {}).values())
        assert all(isinstance(value, str) for value in metadata.get("annotations", {}).values())


def test_objects_have_the_standard_labels(case_manifests):
    for manifest in case_manifests:
        if not manifest["metadata"]["name"].endswith(("-environment", "-text")):  # the user's own
            assert set(manifest["metadata"]["labels"]) >= STANDARD_LABELS


def test_no_two_objects_share_a_name(case_manifests):
    names = [(m["kind"], m["metadata"]["name"]) for m in case_manifests]
    assert len(names) == len(set(names))


def test_selectors_find_the_pods(case_manifests):
    (deployment,) = (m for m in case_manifests if m["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    for manifest in case_manifests:
        if (
            manifest["kind"] == "Service"
            and manifest["metadata"]["labels"]["app.kubernetes.io/component"] != "training"
        ):
            assert manifest["spec"]["selector"].items() <= labels
        if manifest["kind"] == "PodDisruptionBudget":
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels


def test_services_name_ports_that_exist(case_manifests):
    pods = [m["spec"]["template"]["spec"] for m in case_manifests if m["kind"] in ("Deployment", "Job")]
    named = {p["name"] for pod in pods for c in pod["containers"] for p in c.get("ports", [])}
    for manifest in case_manifests:
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} <= named
            assert len({port["port"] for port in manifest["spec"]["ports"]}) == len(manifest["spec"]["ports"])


def test_containers_are_locked_down(pods):
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in filter(is_ours, containers(pod)):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context


def test_images_have_a_fixed_version(pods):
    for pod in pods:
        for container in containers(pod):
            _, at, digest = container["image"].partition("@")
            tag = container["image"].rpartition(":")[2]
            assert digest.startswith("sha256:") if at else re.match(r"\d", tag), container["image"]


def test_mounts_name_volumes_of_the_pod(pods):
    for pod in pods:
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        assert len(volumes) == len(set(volumes))
        for container in containers(pod):
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= set(volumes)
            paths = [mount["mountPath"] for mount in mounts]
            assert len(paths) == len(set(paths))


def test_resources_are_bounded(pods):
    for pod in pods:
        for container in filter(is_ours, containers(pod)):
            assert container["resources"]["requests"]["cpu"]
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]


def test_a_pod_has_time_to_leave(case_manifests):
    (deployment,) = (m for m in case_manifests if m["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    server = next(container for container in pod["containers"] if container["name"] == "server")
    command, delay_s = server["lifecycle"]["preStop"]["exec"]["command"]
    exit_s = next(re.search(r"=(\d+)", a)[1] for a in server["args"] if a.startswith("--exit-timeout"))
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(delay_s) + int(exit_s)


def test_another_chart_can_include_it(chart, tmp_path, call_helm):
    dependency = {"name": "carnelian", "version": "0.1.0", "condition": "carnelian.enabled"}
    definition = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(definition))
    shutil.copytree(chart, tmp_path / "charts" / "carnelian")

    def kinds(*sets):
        done = call_helm("template", "p", str(tmp_path), *(f"--set={value}" for value in sets))
        assert done.returncode == 0, done.stderr
        return {manifest["kind"] for manifest in yaml.safe_load_all(done.stdout) if manifest}

    assert "Deployment" in kinds("carnelian.enabled=true", "carnelian.replicas=2", "global.region=eu")
    assert kinds("carnelian.enabled=false") == set()


@pytest.fixture
def package(chart, tmp_path, call_helm):
    """The file that `helm package` makes of the chart."""
    assert call_helm("package", str(chart), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("carnelian-*.tgz")
    return package


def test_the_packaged_chart_renders_the_same(chart, package, helm, call_helm, render):
    values = str(chart / "ci" / "monitoring-values.yaml")
    packaged = call_helm(
        *("template", "speech-eu", str(package), "--namespace=speech", "--kube-version=1.33.0", "--values", values)
    )
    rendered = [manifest for manifest in yaml.safe_load_all(packaged.stdout) if manifest]
    expected = render(case="monitoring", helm=helm).manifests
    assert [m["metadata"]["name"] for m in rendered] == [m["metadata"]["name"] for m in expected]
    texts = [[m["data"] for m in manifests if m["kind"] == "ConfigMap"] for manifests in (rendered, expected)]
    assert texts[0] == texts[1]
    for name in ("download.py", "check_transcript.py"):
        with tarfile.open(package) as tar:
            packed = tar.extractfile(f"carnelian/files/{name}")
            assert packed.read() == (chart / "files" / name).read_bytes()


def test_the_package_has_what_its_pages_lead_to(chart, package):
    with tarfile.open(package) as tar:
        names = tar.getnames()
    links = re.findall(r"\]\(([^)#:]+)", (chart / "README.md").read_text())
    links += re.findall(r"\bdocs/\w+\.md", (chart / "templates" / "NOTES.txt").read_text())
    assert {"ci", "docs/network.md", "docs/runbook.md"} <= set(links)
    for link in links:
        assert any(f"{name}/".startswith(f"carnelian/{link}/") for name in names), f"the package lacks {link}"


def test_every_file_that_is_mounted_is_rendered(case_manifests, pods):
    configured = {m["metadata"]["name"]: set(m.get("data", ())) for m in case_manifests if m["kind"] == "ConfigMap"}
    volumes = [volume for pod in pods for volume in pod["spec"].get("volumes", ())]
    for given in (volume["configMap"] for volume in volumes if "configMap" in volume):
        if given["name"] != "authorities":  # the user's own
            assert {item["key"] for item in given.get("items", ())} <= configured[given["name"]]

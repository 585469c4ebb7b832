"""The pods of the serving Deployment: their memory, volumes, image, environment, node and names."""

import re

import pytest


def test_shared_memory_is_sized_from_the_python_instances(render):
    pod = render("sharedMemory.pythonInstances=4", "sharedMemory.mebibytesPerInstance=64").pod
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in render().server["volumeMounts"]


@pytest.mark.parametrize("limit", ["896Mi", "917504Ki", "0.875Gi", "939M", "0.9k", "939524096"])
def test_a_memory_limit_that_shared_memory_alone_may_fill_is_refused(limit, refusal):
    assert "may hold 896Mi" in refusal(f"resources.limits.memory={limit}", "resources.requests.memory=1")


@pytest.mark.parametrize("number", ["500000000", "0.5"])
def test_the_refusal_of_a_memory_limit_shows_a_number_as_it_was_written(number, call_helm, chart, tmp_path):
    (tmp_path / "values.yaml").write_text(f"resources: {{limits: {{memory: {number}}}, requests: {{memory: 1}}}}")
    done = call_helm("template", "speech", str(chart), f"--values={tmp_path}/values.yaml")
    assert f"resources.limits.memory is {number}, but" in done.stderr


@pytest.mark.parametrize("limit", ["897Mi", "917505Ki", "0.876Gi", "940M", "1T", "939524097", "null"])
def test_a_memory_limit_above_shared_memory_is_taken(limit, render):
    limits = render(f"resources.limits.memory={limit}", "resources.requests.memory=1").server["resources"]["limits"]
    assert str(limits.get("memory", "null")) == limit


def test_the_default_number_of_python_instances_is_that_of_the_repository(chart, shipped):
    configs = [path.read_text() for path in shipped.glob("*/config.pbtxt")]
    staged = [text for text in configs if "ensemble_scheduling" not in text]
    counts = [int(match[1]) if (match := re.search(r"\bcount: (\d+)", text)) else 1 for text in staged]
    assert f"pythonInstances: {sum(counts)}" in (chart / "values.yaml").read_text()


def test_only_tmp_and_shared_memory_are_writable(render):
    server = render("modelRepository.source=pvc", "modelRepository.pvc.claimName=models").server
    writable = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm"}


def test_a_volume_claim_is_mounted_read_only(render):
    rendered = render(case="cpu")
    claim = next(volume for volume in rendered.pod["volumes"] if volume["name"] == "models")
    assert claim["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = next(mount for mount in rendered.server["volumeMounts"] if mount["name"] == "models")
    assert mount == {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "releases/2026-11-21"}


def test_gpus_are_limits_of_the_named_resource(render):
    assert render(case="gpu").server["resources"]["limits"]["nvidia.com/gpu"] == 1
    sliced = render("runtime=native", "gpu.count=2", "gpu.resourceName=nvidia.com/mig-1g.10gb").server
    assert sliced["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 2
    assert "nvidia.com/gpu" not in render().server["resources"]["limits"]


def test_the_image_says_its_runtime_and_version(render):
    assert render().server["image"] == "carnelian-serving:0.1.0-cpu"
    assert render("runtime=native").server["image"] == "carnelian-serving:0.1.0-native"
    assert render("image.tag=1.2.0").server["image"] == "carnelian-serving:1.2.0"


def test_a_digest_goes_before_the_tag(render):
    digest = "sha256:" + "a" * 64
    assert render(f"image.digest={digest}", "image.tag=v1").server["image"] == f"carnelian-serving@{digest}"


def test_pods_spread_over_nodes_by_this_releases_labels(render):
    rendered = render()
    (constraint,) = rendered.pod["topologySpreadConstraints"]
    selector = rendered.one("Deployment")["spec"]["selector"]
    assert constraint["labelSelector"] == selector
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["matchLabelKeys"] == ["pod-template-hash"]  # an update does not push the new pods together


def test_a_given_spread_selector_is_kept(render):
    given = "topologySpreadConstraints[0]"
    rendered = render(
        f"{given}.maxSkew=2",
        f"{given}.topologyKey=zone",
        f"{given}.whenUnsatisfiable=DoNotSchedule",
        f"{given}.labelSelector.matchLabels.a=b",
    )
    (constraint,) = rendered.pod["topologySpreadConstraints"]
    assert constraint["maxSkew"] == 2
    assert constraint["labelSelector"] == {"matchLabels": {"a": "b"}}


def test_scheduling_of_the_cases_reaches_the_pod(render):
    pod = render(case="gpu").pod
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    cpu = render(case="cpu").pod
    assert cpu["priorityClassName"] == "interactive"
    assert cpu["imagePullSecrets"] == [{"name": "registry"}]


def test_a_pods_annotation_replaces_the_container_that_kubectl_shows(render):
    other = r"podAnnotations.kubectl\.kubernetes\.io/default-container=sidecar"
    for values, name in (((), "server"), ((other,), "sidecar")):
        annotations = render(*values).one("Deployment")["spec"]["template"]["metadata"]["annotations"]
        assert annotations["kubectl.kubernetes.io/default-container"] == name


def test_what_users_add_reaches_the_pod(render):
    rendered = render(case="extras")
    assert rendered.server["env"][-1] == {"name": "OMP_NUM_THREADS", "value": "1"}
    assert rendered.server["envFrom"] == [{"configMapRef": {"name": "environment"}}]
    assert {"name": "cache", "mountPath": "/cache"} in rendered.server["volumeMounts"]
    assert [c["name"] for c in rendered.pod["containers"]] == ["server", "sidecar"]
    assert [c["name"] for c in rendered.pod["initContainers"]][-1] == "wait"
    template = rendered.one("Deployment")["spec"]["template"]["metadata"]
    assert template["labels"].items() >= {"tier": "interactive", "team": "speech"}.items()
    assert template["annotations"]["example.com/scrape"] == "no"
    assert all(m["metadata"]["labels"]["team"] == "speech" for m in rendered.all("Service"))


@pytest.mark.parametrize(
    ("case", "names", "advice"),
    [
        ("default", ["HOME"], "HOME, which the chart sets itself; remove it"),
        ("default", ["CARNELIAN_ADMIN_KEY"], "which the chart sets itself"),
        ("google", ["GOOGLE_APPLICATION_CREDENTIALS"], "which the chart sets itself"),
        ("download", ["AUTHORIZATION"], "which the chart sets itself"),
        ("default", ["HTTPS_PROXY", "HTTPS_PROXY"], "HTTPS_PROXY twice; remove one"),
    ],
)
def test_a_name_that_the_environment_has_already_is_refused(case, names, advice, refusal):
    values = (
        value for i, name in enumerate(names) for value in (f"extraEnv[{i}].name={name}", f"extraEnv[{i}].value=x")
    )
    assert advice in refusal(*values, case=case)


@pytest.mark.parametrize(
    ("case", "values", "said"),
    [
        ("default", ["extraVolumes[0].name=tmp"], "has tmp, which the chart sets itself; remove it or change it"),
        ("google", ["extraVolumes[0].name=google"], "extraVolumes has google, which the chart sets itself"),
        ("default", ["extraVolumeMounts[0].mountPath=/dev/shm"], "has /dev/shm, which the chart sets itself"),
        ("download", ["extraVolumeMounts[0].mountPath=/scripts"], "has /scripts, which the chart sets itself"),
        ("default", ["extraContainers[0].name=server"], "extraContainers has server, which the chart sets itself"),
        ("download", ["extraInitContainers[0].name=download"], "has download, which the chart sets itself"),
        ("default", ["extraContainers[0].name=a", "extraInitContainers[0].name=a"], "has a twice; remove one"),
    ],
)
def test_what_the_pod_has_already_is_refused(case, values, said, refusal):
    """The API server refuses it, in the middle of an upgrade."""
    assert said in refusal(*values, case=case)


def test_a_name_that_the_chart_would_set_may_be_given_where_it_does_not(render):
    server = render("restrictedProtocols.enabled=false", "extraEnv[0].name=CARNELIAN_ADMIN_KEY").server
    assert [variable["name"] for variable in server["env"]].count("CARNELIAN_ADMIN_KEY") == 1


def test_onnxruntime_sends_no_telemetry_whatever_the_image(render):
    rendered = render(case="jobs")
    jobs = (rendered.job(name)["containers"][0] for name in ("-quartznet", "-sweep"))
    for container in (rendered.server, *jobs):
        assert {"name": "ORT_DISABLE_TELEMETRY", "value": "1"} in container["env"]


def test_the_pods_labels_have_no_version_so_that_they_do_not_restart_for_one(render):
    labels = render().one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert not any(name.endswith(("version", "chart")) for name in labels)

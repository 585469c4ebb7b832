"""`helm test`, training and measuring: what the Pods start is what exists, with options it takes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from carnelian_perf.sweeps.grid import Grid
from pydantic import TypeAdapter
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_args

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check_transcript(render, chart, container, secrets):
    """Runs the test Pod's command, on the server that the chart's other arguments started."""

    def check_transcript(*values):
        rendered = render("tls.secretName=tls", *values)
        (pod,) = rendered.one("Pod")["spec"]["containers"]
        (secrets / "check_transcript.py").write_text(rendered.one("ConfigMap", "-test")["data"]["check_transcript.py"])
        assert pod["command"] == ["python3", "/scripts/check_transcript.py"]
        arguments = [argument.replace("=/clips", f"={ROOT}/demo/clips") for argument in pod["args"]]
        arguments = [argument.replace("=/tls", f"={secrets}") for argument in arguments]
        arguments = [f"--url={container.grpc}" if a.startswith("--url") else a for a in arguments]
        command = [sys.executable, str(secrets / "check_transcript.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return check_transcript


def test_helm_test_transcribes_a_recording(check_transcript):
    done = check_transcript()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "character error rate" in done.stdout


def test_helm_test_fails_where_something_else_is_heard(check_transcript):
    done = check_transcript("test.reference=quick brown foxes jump over nothing at all")
    assert done.returncode == 1


def test_helm_test_says_what_is_wrong(check_transcript):
    done = check_transcript("model.name=absent")
    assert done.returncode == 1
    assert "must transcribe" in done.stderr
    assert "absent" in done.stderr


def test_the_reference_is_what_the_clip_s_manifest_says(render, read_rows):
    arguments = render().one("Pod")["spec"]["containers"][0]["args"]
    clips = read_rows(ROOT / "demo" / "clips" / "manifest.jsonl")
    texts = {clip["audio_filepath"]: clip["text"] for clip in clips}
    options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    assert texts[Path(options["clip"]).name] == options["reference"]


def test_the_test_pod_and_its_script_are_hooks(render):
    for manifest in (render().one("Pod"), render().one("ConfigMap", "-test")):
        assert manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_the_test_pod_has_its_own_annotations(render):
    given = render("test.podAnnotations.sidecar\\.istio\\.io/inject=no").one("Pod")["metadata"]["annotations"]
    assert (given["sidecar.istio.io/inject"], given["helm.sh/hook"]) == ("no", "test")


def test_the_test_pod_runs_where_the_server_may(render):
    rendered = render("nodeSelector.kubernetes\\.io/arch=amd64", "tolerations[0].key=speech")
    for pod in (rendered.pod, rendered.one("Pod")["spec"]):
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
        assert pod["tolerations"] == [{"key": "speech"}]


def test_the_test_pod_may_show_a_certificate_of_its_own(render):
    def secret(*values):
        volumes = render(*values).one("Pod")["spec"]["volumes"]
        return [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]

    own = "test.tlsSecretName=client"
    assert secret("tls.secretName=server", own) == ["client"]
    assert secret("tls.secretName=server") == ["server"]
    assert secret(own) == []


def test_the_test_pod_has_its_own_resources(render):
    (container,) = render("test.resources.limits.cpu=1").one("Pod")["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": 1, "memory": "512Mi"}


def test_pods_of_jobs_have_the_common_annotations(render):
    for job in render("commonAnnotations.example\\.com/owner=speech", case="jobs").all("Job"):
        assert job["spec"]["template"]["metadata"]["annotations"]["example.com/owner"] == "speech"


def test_jobs_are_off_by_default(render):
    assert render().all("Job") == []


@pytest.fixture
def torchrun_arguments(render, tmp_path):
    """What torchrun gets in the pod of an index: the container's command is run with a program that prints instead."""
    program = tmp_path / "torchrun"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    (container,) = render(case="jobs").job("-quartznet")["containers"]

    def torchrun_arguments(index):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)}
        command = [*container["command"], *container["args"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()

    return torchrun_arguments


def test_torchrun_takes_the_training_job_s_arguments(torchrun_arguments):
    options = parse_args(torchrun_arguments(0))
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "4", 20)
    assert options.training_script == "carnelian_training.cli"
    assert options.training_script_args[:3] == ["fit", "/configs/quartznet_15x5.yaml", "--out=/data/runs/quartznet"]
    assert "--set=data.train=[{path: /data/train.jsonl}]" in options.training_script_args


@pytest.mark.parametrize(("index", "hosts"), [(0, "is_host=1"), (1, "is_host=0")])
def test_index_0_is_told_that_it_hosts_the_meeting(index, hosts, torchrun_arguments):
    settings = parse_args(torchrun_arguments(index)).rdzv_conf.split(",")
    assert hosts in settings
    # A pod may come this much later than another; 60 s would not be enough to pull an image.
    assert "read_timeout=600" in settings


def test_jobs_have_no_part_in_the_serving_pods_priority(render):
    rendered = render("priorityClassName=interactive", case="jobs")
    assert rendered.pod["priorityClassName"] == "interactive"
    for job in rendered.all("Job"):
        assert "priorityClassName" not in job["spec"]["template"]["spec"]


@pytest.mark.parametrize("job", ["training", "perf"])
def test_pods_of_jobs_take_what_serving_pods_take(job, render):
    given = {
        "podAnnotations.example\\.com/a": "b",
        "priorityClassName": "batch",
        "runtimeClassName": "nvidia",
        "extraEnv[0].name": "NCCL_SOCKET_IFNAME",
        "extraEnv[0].value": "eth1",
        "extraEnvFrom[0].secretRef.name": "tracking",
        "extraVolumes[0].name": "cache",
        "extraVolumeMounts[0].name": "cache",
        "extraVolumeMounts[0].mountPath": "/cache",
    }
    name = {"training": "-quartznet", "perf": "-sweep"}[job]
    values = (f"{job}.{path}={value}" for path, value in given.items())
    template = render(*values, case="jobs").one("Job", name)["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert template["metadata"]["annotations"]["example.com/a"] == "b"
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("batch", "nvidia")
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth1"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "tracking"}}]
    assert pod["volumes"][-1]["name"] == container["volumeMounts"][-1]["name"] == "cache"
    assert container["volumeMounts"][-1]["mountPath"] == "/cache"


def test_pods_of_jobs_have_a_home_that_can_be_written(render, refusal):
    rendered = render(case="jobs")
    for job in ("training", "perf"):
        name = {"training": "-quartznet", "perf": "-sweep"}[job]
        (container,) = rendered.job(name)["containers"]
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
        said = refusal(f"{job}.extraEnv[0].name=HOME", case="jobs")
        assert f"{job}.extraEnv has HOME, which the chart sets itself" in said


@pytest.mark.parametrize(("job", "volume", "mount"), [("training", "data", "/dev/shm"), ("perf", "grid", "/results")])
def test_volumes_and_mounts_that_jobs_have_already_are_refused(job, volume, mount, refusal):
    """The API server refused them."""
    said = refusal(f"{job}.extraVolumes[0].name={volume}", case="jobs")
    assert f"{job}.extraVolumes has {volume}, which the chart sets itself" in said
    said = refusal(f"{job}.extraVolumeMounts[0].mountPath={mount}", case="jobs")
    assert f"{job}.extraVolumeMounts has {mount}, which the chart sets itself" in said


@pytest.mark.parametrize("name", ["POD_IP", "ORT_DISABLE_TELEMETRY"])
def test_variables_that_training_sets_itself_are_refused(name, refusal):
    said = refusal(f"training.extraEnv[0].name={name}", case="jobs")
    assert f"training.extraEnv has {name}, which the chart sets itself" in said


@pytest.mark.parametrize("job", ["training", "perf"])
def test_variables_of_jobs_that_are_given_twice_are_refused(job, refusal):
    twice = [f"{job}.extraEnv[{i}].name=A" for i in range(2)]
    assert f"{job}.extraEnv has A twice" in refusal(*twice, case="jobs")


def test_training_pods_find_each_other_by_name(render):
    rendered = render(case="jobs")
    job, service = rendered.one("Job", "-quartznet"), rendered.one("Service", "-quartznet")
    pod = job["spec"]["template"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"] is True
    (endpoint,) = (a for a in pod["spec"]["containers"][0]["args"] if a.startswith("--rdzv-endpoint="))
    name = job["metadata"]["name"]
    assert endpoint == f"--rdzv-endpoint={name}-0.{name}.speech.svc:29400"


def test_training_pods_never_share_a_node(render):
    pod = render(case="jobs").one("Job", "-quartznet")["spec"]["template"]
    (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    kept_away = term["labelSelector"]["matchLabels"]
    assert kept_away.items() <= pod["metadata"]["labels"].items()
    assert kept_away["carnelian.dev/run"] == "quartznet"  # not the pods of another run


def test_a_single_training_pod_goes_anywhere(render):
    pod = render("training.nodes=1", case="jobs").job("-quartznet")
    assert "affinity" not in pod


def test_serving_does_not_select_training_pods(render):
    rendered = render(case="jobs")
    labels = rendered.one("Job", "-quartznet")["spec"]["template"]["metadata"]["labels"]
    assert not rendered.one("Service", "carnelian")["spec"]["selector"].items() <= labels.items()


def test_training_survives_the_loss_of_a_node(render):
    spec = render(case="jobs").one("Job", "-quartznet")["spec"]
    assert spec["backoffLimit"] == 20 * spec["completions"] == 40  # if all end because of one
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_a_pod_that_leaves_has_time_for_a_checkpoint(render, monkeypatch):
    pod = render(case="jobs").job("-quartznet")
    for variable in pod["containers"][0]["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    torchrun = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert 100 <= torchrun.shutdown_timeout < pod["terminationGracePeriodSeconds"]


def test_training_on_the_cpu_asks_for_no_gpu(render):
    (container,) = render("training.gpusPerNode=0", case="jobs").job("-quartznet")["containers"]
    assert set(container["resources"]["limits"]) == {"memory"}
    assert "--nproc-per-node=1" in container["args"]


@pytest.mark.parametrize(
    ("values", "threads"),
    [
        ((), "2"),  # of the 8 cores that four processes share
        (("training.gpusPerNode=0",), "8"),
        (("training.gpusPerNode=3",), "2"),
        (("training.gpusPerNode=16",), "1"),
        (("training.resources.requests.cpu=6500m",), "1"),
        (("training.resources.requests.cpu=null", "training.resources.limits.cpu=12"), "3"),
        (("training.resources.requests.cpu=null",), None),
        (("training.extraEnv[0].name=OMP_NUM_THREADS", "training.extraEnv[0].value=given"), "given"),
    ],
)
def test_processes_of_a_training_pod_share_the_cores_that_it_requests(values, threads, render):
    """torchrun gives each of several processes one thread, and PyTorch a single one as many as the node has cores."""
    (container,) = render(*values, case="jobs").job("-quartznet")["containers"]
    given = [variable["value"] for variable in container["env"] if variable["name"] == "OMP_NUM_THREADS"]
    assert given == ([threads] if threads else [])


def test_training_without_a_volume_is_refused(refusal):
    assert "name a claim" in refusal("training.enabled=true")


@pytest.mark.parametrize("value", ["resources.limits.memory=8Gi", "sharedMemory=134217728Ki"])
def test_a_memory_limit_that_training_s_shared_memory_alone_may_fill_is_refused(value, refusal):
    assert "lower training.sharedMemory" in refusal(f"training.{value}", case="jobs")


def test_carnelian_perf_takes_the_grid(render):
    grid = yaml.safe_load(render(case="jobs").one("ConfigMap", "-sweep")["data"]["grid.yaml"])
    checked = TypeAdapter(Grid).validate_python(grid)
    assert checked.server.grpc == "speech-eu-carnelian.speech.svc:8001"
    assert checked.durations_s == [2, 7]
    assert list(checked.models) == ["quartznet_15x5"]  # model.name, without another default beside it
    given = render("perf.grid.models.other.precision=fp16", case="jobs").one("ConfigMap", "-sweep")["data"]["grid.yaml"]
    assert yaml.safe_load(given)["models"] == {"other": {"precision": "fp16"}}


@pytest.mark.parametrize(
    ("sweep", "status", "output", "error", "ends"),
    [
        ("mkdir sweep; touch sweep/cell", 0, "swept\n| clips/s |\n", "", 0),
        ("mkdir sweep; touch sweep/cell", 1, "swept\n| clips/s |\n", "", 3),
        ("mkdir sweep", 1, "swept\n", "no results\n", 1),
        ("echo wrong grid >&2", 1, "swept\n", "wrong grid\n", 1),
    ],
)
def test_the_report_is_in_the_job_s_log_whatever_failed(render, tmp_path, sweep, status, output, error, ends):
    (perf,) = render(case="jobs").job("-sweep")["containers"]
    program = tmp_path / "carnelian-perf"
    program.write_text(
        f"""#!/bin/sh
if [ "$*" = "sweep /grid/grid.yaml --out={tmp_path}/sweep" ]; then
    echo swept; {sweep}; exit {status}
fi
[ "$1" = report ] && [ -e "$2/cell" ] && echo "| clips/s |" > "$2.md" && exit
echo no results >&2; exit 2
"""
    )
    program.chmod(0o755)
    (folder,) = (argument.replace("/results", str(tmp_path)) for argument in perf["args"])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [*perf["command"], folder],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (output, error, ends)


def test_a_failed_cell_does_not_have_everything_measured_again(render):
    """With a claim another try goes on where the last one ended; without one nothing is left of it."""
    job = render("perf.claimName=", case="jobs").one("Job", "-sweep")["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "perf", "operator": "In", "values": [3]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert "podFailurePolicy" not in render(case="jobs").one("Job", "-sweep")["spec"]


def test_jobs_that_cannot_work_are_refused(refusal):
    assert "choose another" in refusal("perf.name=test", case="jobs")
    assert "choose another" in refusal("training.name=headless", case="jobs")
    assert "choose another" in refusal("training.name=sweep", case="jobs")
    assert "without TLS" in refusal("tls.secretName=tls", case="jobs")
    loaded = "model.load={quartznet_15x5}"
    assert "measures quartznet_15x5_pcm, but model.load does not have it" in refusal(loaded, case="jobs")
    assert "measures other," in refusal(loaded, "perf.grid.models.other.precision=fp16", case="jobs")


def test_files_alone_need_no_model_for_samples(render):
    files = ("perf.grid.static=null", "perf.grid.files.concurrency={1}")
    for loaded in (("model.load={quartznet_15x5}", *files), ("model.load={quartznet_15x5,quartznet_15x5_pcm}",)):
        assert render(*loaded, case="jobs").one("Job", "-sweep")


def test_the_report_is_kept(render):
    pod = render(case="jobs").job("-sweep")
    assert pod["containers"][0]["args"] == ["/results/sweep"]
    (results,) = (volume for volume in pod["volumes"] if volume["name"] == "results")
    assert results["persistentVolumeClaim"] == {"claimName": "results"}
    assert pod["nodeSelector"] == {"workload": "measuring"}
    assert pod["tolerations"] == [{"key": "measuring", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("image.pullPolicy", "=Always"),
        ("image.pullSecrets", "[0].name=registry"),
        ("podSecurityContext", ".runAsUser=1000"),
        ("securityContext", ".readOnlyRootFilesystem=false"),
        ("commonLabels", ".team=speech"),
        ("commonAnnotations", ".team=speech"),
        ("serviceAccount", ".create=false"),
    ],
)
def test_the_values_that_the_page_names_change_the_pods_of_a_job(name, rest, render, chart):
    """An upgrade with one fails while the Job is there."""
    assert f"`{name}`" in (chart / "docs" / "jobs.md").read_text()
    changed = zip(pods_of_jobs(render(name + rest, case="jobs")), pods_of_jobs(render(case="jobs")), strict=True)
    assert all(after != before for after, before in changed)


def test_an_upgrade_of_the_server_leaves_jobs_as_they_are(render):
    values = ("image.tag=next", "replicas=3", "server.logLevel=info", "model.load={quartznet_15x5,quartznet_15x5_pcm}")
    assert pods_of_jobs(render(*values, case="jobs")) == pods_of_jobs(render(case="jobs"))


def pods_of_jobs(rendered):
    return [job["spec"]["template"] for job in rendered.all("Job")]

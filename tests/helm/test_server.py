"""The serving Deployment and what stands around it."""

from pathlib import Path
from typing import Any

import pytest
from carnelian_serving.cli import app
from carnelian_serving.triton_options import CACHES, OWN_OPTIONS, UNRESTRICTED
from typer.main import get_command

ROOT = Path(__file__).parents[2]


def arguments(container: dict[str, Any]) -> list[str]:
    return [argument.partition("=")[0] for argument in container["args"]]


def test_the_wheel_runtime_starts_carnelian_serve_with_options_it_has(render):
    server = render("server.threads=2", "model.load={quartznet_demo}").server
    assert server["command"] == ["carnelian-serve"]
    own = arguments(server)[: arguments(server).index("--")]
    known = {option for parameter in get_command(app).params for option in parameter.opts}
    assert set(own) <= known
    assert {"--threads", "--model", "--repository", "--exit-timeout"} <= set(own)


def test_the_native_runtime_starts_tritonserver(render):
    server = render("runtime=native", "server.threads=2", "model.load={quartznet_demo}").server
    assert server["command"][-1] == "tritonserver"
    assert "--" not in server["args"]
    assert "--model-control-mode=explicit" in server["args"]
    assert "--load-model=quartznet_demo" in server["args"]
    assert "--backend-config=onnxruntime,intra_op_thread_count=2" in server["args"]


@pytest.mark.parametrize(
    ("values", "threads"),
    [
        ((), 2),
        (("resources.requests.cpu=6",), 6),
        (("resources.requests.cpu=2500m",), 2),
        (("resources.requests.cpu=1.5",), 1),
        (("resources.requests.cpu=500m",), 1),
        (("resources.requests.cpu=null", "resources.limits.cpu=4"), 4),
        (("resources.requests=null",), None),
        (("server.threads=3", "resources.requests.cpu=6"), 3),
        (("server.threads=0",), None),
    ],
)
def test_a_pod_takes_the_cores_that_it_requests_and_not_all_of_its_node(values, threads, render):
    options = {"wheel": "--threads=", "native": "--backend-config=onnxruntime,intra_op_thread_count="}
    for runtime, option in options.items():
        arguments = render(f"runtime={runtime}", *values).server["args"]
        assert [a for a in arguments if "thread" in a and "threadpool" not in a] == (
            [f"{option}{threads}"] if threads else []
        )


@pytest.mark.parametrize("runtime", ["wheel", "native"])
def test_both_runtimes_listen_alike(runtime, render):
    server = render(f"runtime={runtime}").server
    assert {"--http-port=8000", "--grpc-port=8001", "--metrics-port=8002"} <= set(server["args"])
    assert [port["containerPort"] for port in server["ports"]] == [8000, 8001, 8002]
    assert {port["protocol"] for port in server["ports"]} == {"TCP"}  # server-side apply finds list items by it
    assert any(argument.endswith("0.0.0.0") for argument in server["args"])
    assert "--metrics-config=summary_latencies=true" in server["args"]


def test_an_ipv6_address_is_spelled_as_each_of_tritons_servers_wants_it(render):
    assert "--host=::" in render("server.host=::").server["args"]  # carnelian-serve does the same by itself
    native = render("runtime=native", "server.host=::").server["args"]
    assert [argument for argument in native if "-address=" in argument] == [
        "--http-address=ipv6:::",
        "--grpc-address=[::]",
        "--metrics-address=ipv6:::",
    ]


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("error", {"--log-info=false", "--log-warning=false"}),
        ("warning", {"--log-info=false"}),
        ("info", set()),
        ("verbose", {"--log-verbose=1"}),
    ],
)
def test_log_levels_of_tritonserver(level, options, render):
    server = render("runtime=native", f"server.logLevel={level}").server
    assert {argument for argument in server["args"] if argument.startswith("--log")} == options


@pytest.mark.parametrize("runtime", ["wheel", "native"])
def test_connections_end_before_a_pod_does(runtime, render):
    server = render(f"runtime={runtime}").server
    (age_ms,) = (int(a.partition("=")[2]) for a in server["args"] if a.startswith("--grpc-max-connection-age="))
    assert age_ms * 1.1 < int(server["lifecycle"]["preStop"]["exec"]["command"][1]) * 1000
    endless = render(f"runtime={runtime}", "drain.connectionAgeSeconds=0").server
    assert not any(argument.startswith("--grpc-max-connection-age") for argument in endless["args"])


def test_extra_arguments_come_last(render):
    server = render("server.extraArgs={--grpc-keepalive-time=30000}").server
    assert server["args"][-1] == "--grpc-keepalive-time=30000"
    assert server["args"].index("--") < len(server["args"]) - 1


@pytest.mark.parametrize("option", sorted(OWN_OPTIONS))
def test_options_that_the_launcher_has_are_no_extra_arguments(option, refusal):
    for runtime in ("wheel", "native"):
        for spelling in (option, option[:-1]):
            said = refusal(f"runtime={runtime}", f"server.extraArgs={{{spelling}=1}}")
            assert f"server.extraArgs has {option}, which the chart sets itself; remove it" in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--http-port", "service.httpPort"),
        ("--grpc-port", "service.grpcPort"),
        ("--exit-timeout-secs", "drain.timeoutSeconds"),
        ("--model-repository", "modelRepository"),
        ("--http-address", "server.host"),
        ("--metrics-address", "server.host"),
        ("--http-restricted-api", "restrictedProtocols"),
    ],
)
def test_the_refusal_of_an_extra_argument_names_the_value(option, value, refusal):
    assert f"and set {value}\n" in refusal(f"server.extraArgs={{{option}=1}}")


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_the_refusal_of_a_model_control_mode_says_what_it_would_do(mode, refusal):
    said = refusal(f"server.extraArgs={{--model-control-mode={mode}}}")
    assert "explicit lets callers load code, and poll reads folders that are half copied" in said
    assert "and set model.load\n" in said
    said = refusal(f"server.extraArgs={{--model-control-mode={mode}}}", "model.load={quartznet_demo}")
    assert "server.extraArgs has --model-control-mode, which the chart sets itself; remove it" in said


@pytest.mark.parametrize("kind", ["http", "grpc", "metrics"])
def test_no_port_of_the_server_can_be_taken_away(kind, refusal):
    said = refusal("runtime=native", f"server.extraArgs={{--allow-{kind}=false}}")
    assert f"server.extraArgs has --allow-{kind}, but its port is for probes, Services and monitors; remove it" in said


@pytest.mark.parametrize("option", CACHES)
def test_no_answer_is_cached(option, refusal):
    said = refusal("runtime=native", f"server.extraArgs={{{option}=1}}")
    assert f"server.extraArgs has {option}, but Triton's cache gives a caller the answer to another" in said


@pytest.mark.parametrize("option", UNRESTRICTED)
def test_no_port_without_restrictions_is_opened(option, refusal):
    said = refusal(f"server.extraArgs={{{option}=true}}")
    assert f"server.extraArgs has {option}, but it opens a port through which all protocols are called" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_address_that_probes_do_not_reach_is_refused(host, refusal):
    assert f"server.host is {host}, where neither probes nor Services reach the pod" in refusal(f"server.host={host}")


def test_readiness_asks_for_the_model_and_not_for_the_process(render):
    server = render("model.name=quartznet_15x5").server
    assert server["readinessProbe"]["httpGet"] == {"path": "/v2/models/quartznet_15x5/ready", "port": "http"}
    assert server["startupProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_a_restart_does_not_wait_as_long_as_a_pod_that_leaves(render):
    """The kubelet runs preStop, which only sleeps, before it ends a container that a probe has found dead."""
    pod = render("drain.timeoutSeconds=20").pod
    for probe in ("startupProbe", "livenessProbe"):
        assert pod["containers"][0][probe]["terminationGracePeriodSeconds"] == 20 < pod["terminationGracePeriodSeconds"]


def test_the_startup_probe_covers_its_timeout(render):
    probe = render("probes.startup.timeoutSeconds=301", "probes.startup.periodSeconds=10").server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 310


def test_the_default_model_is_in_the_repository(render):
    path = render().server["readinessProbe"]["httpGet"]["path"]
    assert (ROOT / "model_repository" / path.split("/")[3] / "config.pbtxt").is_file()


def test_extra_objects_are_templates(render):
    names = {manifest["metadata"]["name"] for manifest in render(case="extras").all("ConfigMap")}
    assert names >= {"speech-eu-environment", "speech-eu-text"}


def test_labels_that_users_add_never_replace_the_standard_ones(render):
    rendered = render("commonLabels.app\\.kubernetes\\.io/name=x", "podLabels.app\\.kubernetes\\.io/instance=y")
    assert rendered.one("Deployment")["metadata"]["labels"]["app.kubernetes.io/name"] == "carnelian"
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "speech-eu"


@pytest.mark.parametrize("case", ["default", "monitoring", "download", "jobs"])
def test_the_longest_name_has_room_for_suffixes(case, render):
    runs = ("training.name=a-long-name1", "training.nodes=1000", "perf.name=a-long-name2") if case == "jobs" else ()
    rendered = render("fullnameOverride=" + "a" * 46, *runs, case=case)
    assert all(len(manifest["metadata"]["name"]) <= 63 for manifest in rendered.manifests)
    for job in rendered.all("Job"):
        if job["spec"].get("completionMode") == "Indexed":  # the names of its pods must be host names
            assert len(f"{job['metadata']['name']}-{job['spec']['completions'] - 1}") <= 63


def test_longer_names_are_refused_since_two_could_be_cut_to_one(refusal, call_helm, chart):
    advice = "set fullnameOverride, of 46 characters at most"
    assert advice in refusal("fullnameOverride=" + "a" * 47)
    assert advice in refusal("nameOverride=" + "a" * 46)
    assert "nameOverride" in refusal("nameOverride=" + "a" * 47, "fullnameOverride=speech")  # it is a label, too
    assert advice in call_helm("template", "a" * 37, str(chart)).stderr
    assert call_helm("template", "a" * 36, str(chart)).returncode == 0


def test_a_release_called_like_the_chart_is_named_once(render):
    assert render("nameOverride=speech").one("Deployment")["metadata"]["name"] == "speech-eu"


def test_a_release_whose_name_no_service_can_have_is_refused(call_helm, chart):
    for release in ("2speech", "speech.eu"):
        done = call_helm("template", release, str(chart))
        assert done.returncode != 0
        assert "set fullnameOverride" in done.stderr
        assert call_helm("template", release, str(chart), "--set=fullnameOverride=speech").returncode == 0


def test_services_without_an_address_have_the_pods_ports(render):
    rendered = render("service.grpcPort=443")
    assert [port["port"] for port in rendered.one("Service", "carnelian")["spec"]["ports"]] == [443, 8000]
    ports = {port["name"]: port["containerPort"] for port in rendered.server["ports"]}
    for name in ("-headless", "-metrics"):
        for port in rendered.one("Service", name)["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]


def test_metrics_are_not_on_the_service_that_is_exposed(render):
    rendered = render("service.type=LoadBalancer")
    assert [port["name"] for port in rendered.one("Service", "carnelian")["spec"]["ports"]] == ["grpc", "http"]
    metrics = rendered.one("Service", "-metrics")["spec"]
    assert metrics["type"] == "ClusterIP"
    assert [port["port"] for port in metrics["ports"]] == [8002]


def test_the_service_account_has_no_token_of_kubernetes(render):
    account = render(case="cpu").one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["name"] == "speech"
    assert "iam.gke.io/gcp-service-account" in account["metadata"]["annotations"]
    assert render(case="cpu").pod["serviceAccountName"] == "speech"


def test_without_a_service_account_the_namespaces_own_is_used(render):
    rendered = render(case="extras")
    assert rendered.all("ServiceAccount") == []
    assert rendered.pod["serviceAccountName"] == "default"


def test_the_disruption_budget_lets_pods_go_that_do_not_serve(render):
    spec = render().one("PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert render(case="extras").all("PodDisruptionBudget") == []


def test_an_update_takes_no_pod_away_before_its_successor_is_ready(render):
    strategy = render().one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}

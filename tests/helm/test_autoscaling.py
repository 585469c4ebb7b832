"""HPA, KEDA and the rules for prometheus-adapter, as rendered."""

import json
import runpy

import pytest


def test_the_hpa_owns_the_number_of_pods(render):
    rendered = render(case="monitoring")
    assert "replicas" not in rendered.one("Deployment")["spec"]
    spec = rendered.one("HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "speech-eu-carnelian"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 10)


def test_without_autoscaling_the_deployment_says_how_many(render):
    assert render("replicas=3").one("Deployment")["spec"]["replicas"] == 3
    assert render().all("HorizontalPodAutoscaler") == []


def test_the_number_of_pods_may_be_somebody_else_s(render):
    assert "replicas" not in render("replicas=null").one("Deployment")["spec"]


def test_the_hpa_scales_on_audio_in_progress(render):
    rendered = render(case="monitoring")
    assert rendered.one("HorizontalPodAutoscaler")["apiVersion"] == "autoscaling/v2"
    audio, cpu = rendered.one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert audio["pods"]["metric"]["name"] == "carnelian_audio_seconds_in_progress"
    assert audio["pods"]["target"] == {"type": "AverageValue", "averageValue": "20"}
    assert cpu["resource"]["target"] == {"type": "Utilization", "averageUtilization": 80}


def test_the_adapter_is_told_the_metric_that_the_hpa_asks_for(render, adapter_rule):
    metric = render(case="monitoring").one("HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert adapter_rule["name"] == {"as": metric}
    assert adapter_rule["resources"]["overrides"] == {
        "namespace": {"resource": "namespace"},
        "pod": {"resource": "pod"},
    }


def test_pods_come_fast_and_go_slowly(render):
    behavior = render(case="monitoring").one("HorizontalPodAutoscaler")["spec"]["behavior"]
    assert "stabilizationWindowSeconds" not in behavior["scaleUp"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]


def test_keda_scales_to_zero_with_something_that_wakes_it(render):
    spec = render(case="keda").one("ScaledObject")["spec"]
    assert spec["minReplicaCount"] == 0
    assert spec["fallback"]["replicas"] == 2
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"  # a Prometheus that is away removes no pod
    audio, wake = spec["triggers"]
    assert audio["metadata"]["threshold"] == "20"
    assert wake["metadata"]["activationThreshold"] == "0"
    assert "nginx_ingress_controller_requests" in wake["metadata"]["query"]
    assert "replicas" not in render(case="keda").one("Deployment")["spec"]


def test_keda_may_have_to_say_who_it_is(render):
    keda = "autoscaling.keda"
    values = (f"{keda}.authenticationRef.name=token", f"{keda}.authenticationRef.kind=ClusterTriggerAuthentication")
    spec = render(*values, f"{keda}.metadata.authModes=bearer", case="keda").one("ScaledObject")["spec"]
    for trigger in spec["triggers"]:
        assert trigger["authenticationRef"] == {"name": "token", "kind": "ClusterTriggerAuthentication"}
        assert trigger["metadata"]["authModes"] == "bearer"
        assert trigger["metadata"]["serverAddress"].startswith("http://")
    for trigger in render(case="keda").one("ScaledObject")["spec"]["triggers"]:
        assert "authenticationRef" not in trigger


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (("autoscaling.mode=hpa", "autoscaling.minReplicas=0"), "set 1, or autoscaling.mode: keda"),
        (("autoscaling.mode=keda", "autoscaling.minReplicas=0"), "set autoscaling.keda.activationQuery"),
        (("autoscaling.minReplicas=9",), "above autoscaling.maxReplicas"),
        (("autoscaling.audioSecondsInProgress=0",), "autoscaling"),
        (("autoscaling.mode=vpa",), "autoscaling"),
        (("autoscaling.windowSeconds=5",), "autoscaling"),
        (
            (
                "autoscaling.mode=hpa",
                "autoscaling.windowSeconds=30",
                "monitoring.podMonitor.enabled=true",
                "monitoring.podMonitor.intervalSeconds=30",
            ),
            "needs two scrapes",
        ),
    ],
)
def test_scaling_that_cannot_work_is_refused(values, advice, refusal):
    assert advice in refusal(*values)


@pytest.mark.parametrize(("raw", "page"), [("pressure", "autoscaling"), ("overload", "sizing")])
def test_the_table_is_that_of_the_raw_file(chart, raw, page):
    script = runpy.run_path(str(chart / "docs" / f"{raw}.py"))
    rows = json.loads((chart / "docs" / f"{raw}.json").read_text())["rows"]
    text = (chart / "docs" / f"{page}.md").read_text()
    assert "\n".join(map(script["render_row"], rows)) in text

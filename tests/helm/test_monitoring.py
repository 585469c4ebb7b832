"""Monitors, rules and dashboard, as rendered and under promtool."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent


@pytest.fixture
def promtool(find_tool, tmp_path):
    """Runs promtool in a folder and returns what it says; fails if it does."""

    def promtool(*arguments):
        command = [find_tool("promtool"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return promtool


def test_every_alert_fires_and_is_silent_as_written(groups, tmp_path, promtool):
    rules = json.loads(json.dumps(groups))
    for rule in (rule for group in rules for rule in group["rules"] if "alert" in rule):
        rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "alerts.yaml")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alerts):
    cases = [
        case
        for test in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    names = {alert["alert"] for alert in alerts}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_every_alert_has_a_page_in_the_runbook(alerts, chart):
    pages = set(re.findall(r"^## (\w+)$", (chart / "docs" / "runbook.md").read_text(), re.M))
    assert {alert["alert"] for alert in alerts} == pages
    for alert in alerts:
        assert (
            alert["annotations"]["runbook_url"] == f"https://runbooks.example.com/carnelian.md#{alert['alert'].lower()}"
        )
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["labels"]["team"] == "speech"


def test_a_given_severity_takes_the_place_of_the_alerts_own(render):
    rules = render("monitoring.rules.alertLabels.severity=page", case="monitoring").one("PrometheusRule")
    found = [rule["labels"] for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {(labels["severity"], labels["release"]) for labels in found} == {("page", "speech-eu-carnelian")}


def test_a_pod_may_take_its_time_to_start(render):
    patience = []
    for seconds in (60, 600):
        rules = render(f"probes.startup.timeoutSeconds={seconds}", case="monitoring").one("PrometheusRule")
        found = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
        patience += [rule["for"] for rule in found if rule.get("alert") == "CarnelianPodDown"]
    assert patience == ["300s", "600s"]


def test_nobody_is_woken_while_pods_may_still_start(render, tmp_path, promtool):
    """A pod that takes 29 of its 30 minutes, and an update of three, one pod at a time; another pod never starts."""
    values = ("probes.startup.timeoutSeconds=1800", "progressDeadlineSeconds=1900", "monitoring.rules.enabled=true")
    rendered = render(*values)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rendered.one("PrometheusRule")["spec"]))
    alert = list_alerts(rendered)["CarnelianModelNotReady"]
    deployment = {"namespace": "speech", "deployment": "speech-eu-carnelian"}
    annotations = {name: text.replace("{{ $value }}", "1") for name, text in alert["annotations"].items()}
    fires = [{"exp_labels": alert["labels"] | deployment, "exp_annotations": annotations}]
    cases = (
        ("1x29 0x61", "1x90", "1x90", []),
        ("1x87 0x3", "1x29 2x29 3x29", "4x87 3x3", []),
        ("1x90", "1x90", "1x90", fires),
    )
    tests = []
    for *series, expected in cases:
        names = ("unavailable", "updated", "")
        metrics = [f"kube_deployment_status_replicas{name and '_'}{name}" for name in names]
        selector = '{namespace="speech",deployment="speech-eu-carnelian"}'
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": m + selector, "values": v} for m, v in zip(metrics, series, strict=True)],
                "alert_rule_test": [
                    {"alertname": "CarnelianModelNotReady", "eval_time": f"{minute}m", "exp_alerts": alerts}
                    for minute, alerts in ((28, []), (40, expected), (86, expected))
                ],
            }
        )
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", "tests.yaml")


def test_alerts_concern_this_release_alone(alerts):
    for alert in alerts:
        selectors = re.findall(r"\{([^}]*)\}", alert["expr"])
        assert selectors
        assert all('namespace="speech"' in selector for selector in selectors)


def test_thresholds_reach_the_alerts(render):
    rules = render("monitoring.thresholds.latencyP95Seconds=0.7", case="monitoring").one("PrometheusRule")
    (slow,) = (r for g in rules["spec"]["groups"] for r in g["rules"] if r.get("alert") == "CarnelianSlow")
    assert slow["expr"].endswith("> 0.7")


def test_the_service_monitor_finds_the_metrics_service(render):
    rendered = render(case="monitoring")
    monitor = rendered.one("ServiceMonitor")
    service = rendered.one("Service", "-metrics")
    others = [s for s in rendered.all("Service") if s is not service]
    assert not any(
        monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items() for s in others
    )
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["speech"]}


def test_the_pod_monitor_finds_the_pods(render):
    rendered = render(case="keda")
    monitor = rendered.one("PodMonitor")["spec"]
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] in [port["name"] for port in rendered.server["ports"]]


@pytest.mark.parametrize("case", ["monitoring", "keda"])
def test_scraped_series_carry_the_release(case, render):
    rendered = render(case=case)
    (monitor,) = rendered.all("ServiceMonitor") + rendered.all("PodMonitor")
    (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "speech-eu-carnelian"}]


def list_alerts(rendered: Any) -> dict[str, dict[str, Any]]:
    groups = rendered.one("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_alerts_have_no_link_without_a_runbook(render):
    for alert in list_alerts(render(case="keda")).values():
        assert "runbook_url" not in alert["annotations"]


def test_no_alert_asks_for_quantiles_that_are_off(render):
    without = list_alerts(render("server.latencySummaries=false", case="monitoring"))
    assert len(without) == 8
    assert not any("_summary_us" in alert["expr"] for alert in without.values())


@pytest.mark.parametrize("case", ["keda", "monitoring"])
def test_nobody_is_woken_where_no_pod_is_wanted(case, render, tmp_path, promtool):
    """Whoever scaled the Deployment to zero, the absence of pods is an outage only if it wants some."""
    rules = render(case=case).one("PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    down = {"alertname": "CarnelianDown", "eval_time": "10m"}
    alert = list_alerts(render(case=case))["CarnelianDown"]
    labels = alert["labels"] | {"namespace": "speech", "release": "speech-eu-carnelian"}
    fires = [{"exp_labels": labels, "exp_annotations": alert["annotations"]}]
    series = 'kube_deployment_spec_replicas{namespace="speech",deployment="speech-eu-carnelian"}'
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": f"{wanted}x20"}],
            "alert_rule_test": [down | {"exp_alerts": expected}],
        }
        for wanted, expected in ((0, []), (1, fires))
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", "tests.yaml")


def test_scrapes_that_are_too_rare_for_the_rules_are_refused(refusal):
    """CarnelianSaturated could never fire: rates of two minutes have gaps then."""
    values = ("monitoring.rules.enabled=true", "monitoring.podMonitor.enabled=true")
    assert "need two scrapes" in refusal(*values, "monitoring.podMonitor.intervalSeconds=61")


def test_two_monitors_at_once_are_refused(refusal):
    assert "choose one" in refusal("monitoring.serviceMonitor.enabled=true", "monitoring.podMonitor.enabled=true")


def test_the_dashboard_is_found_by_the_side_car(render):
    metadata = render(case="monitoring").one("ConfigMap", "-dashboard")["metadata"]
    assert metadata["labels"]["grafana_dashboard"] == "1"
    assert metadata["annotations"] == {"grafana_folder": "Speech"}


def test_panels_do_not_overlap(dashboard):
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_query_of_the_dashboard_is_of_one_release(dashboard):
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for selector in re.findall(r"\{([^}]*)\}", target["expr"]):
                assert selector.startswith('namespace="$namespace",release="$release"'), panel["title"]


def test_the_dashboard_counts_what_is_turned_away_as_the_alert_does(dashboard, alerts):
    (expression,) = (
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if target["legendFormat"].startswith("turned away")
    )
    (alert,) = (alert for alert in alerts if alert["alert"] == "CarnelianRejecting")
    expression = expression.replace("$namespace", "speech").replace("$release", "speech-eu-carnelian")
    assert alert["expr"].startswith(f"({expression.replace('$__rate_interval', '5m')}) / ")

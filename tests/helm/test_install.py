"""What Helm does with a cluster's help, and what it says: the key that is kept, NOTES.txt.

No API server can be had here. Helm asks one for its version, its resources and objects; the server below answers that.
"""

import base64
import functools
import http.server
import json
import subprocess
import threading
from typing import Any

import pytest
import yaml

KEY = base64.b64encode(b"kept-from-the-first-installation").decode()
KINDS = {
    "v1": {"configmaps": "ConfigMap", "pods": "Pod", "secrets": "Secret", "services": "Service"}
    | {"serviceaccounts": "ServiceAccount"},
    "apps/v1": {"deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
}


def list_resources(version: str) -> dict[str, Any]:
    common = {"singularName": "", "namespaced": True, "verbs": ["create", "get", "list", "patch"]}
    resources = [{"name": name, "kind": kind, **common} for name, kind in KINDS[version].items()]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def list_groups() -> dict[str, Any]:
    groups = []
    for version in KINDS:
        group, slash, name = version.partition("/")
        if slash:
            served = {"groupVersion": version, "version": name}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


ANSWERS: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": list_resources("v1"),
    "/apis": list_groups(),
    **{f"/apis/{version}": list_resources(version) for version in KINDS if "/" in version},
}
SECRET = "/api/v1/namespaces/speech/secrets/speech-carnelian-admin"


class Api(http.server.BaseHTTPRequestHandler):
    """Answers GET with what the server holds, in JSON."""

    def __init__(self, answers: dict[str, dict[str, Any]], *arguments: Any) -> None:
        self._answers = answers
        super().__init__(*arguments)

    def do_GET(self) -> None:
        answer = self._answers.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(missing if answer is None else answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster(tmp_path):
    """What the server answers, to be added to, and the kubeconfig that leads to it."""
    answers = dict(ANSWERS)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Api, answers)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        yield answers, tmp_path / "kubeconfig"
        server.shutdown()


@pytest.fixture
def render_in_cluster(cluster, helm, find_tool, chart):
    def render_in_cluster(*sets):
        command = [find_tool(helm), "template", "speech", str(chart), "--namespace=speech", "--dry-run=server"]
        command.append("--disable-openapi-validation")
        command += [f"--kubeconfig={cluster[1]}", "--show-only=templates/secret.yaml", *(f"--set={s}" for s in sets)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["data"]["key"]

    return render_in_cluster


def test_a_key_that_was_made_up_is_kept(cluster, render_in_cluster):
    first = render_in_cluster()
    assert render_in_cluster() != first
    cluster[0][SECRET] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": "speech-carnelian-admin",
            "namespace": "speech",
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": "speech", "meta.helm.sh/release-namespace": "speech"},
        },
        "data": {"key": KEY},
    }
    assert render_in_cluster() == KEY
    given = base64.b64decode(render_in_cluster("restrictedProtocols.key=0123456789abcdef"))
    assert given == b"0123456789abcdef"


# Helm shows NOTES.txt only to who installs; as an object of the user's, `helm template` shows it too.
NOTES = """
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data: {notes: {{ include "carnelian/templates/NOTES.txt" . | quote }}}
"""


@pytest.fixture
def notes(tmp_path, chart, helm, call_helm):
    """What Helm says after an installation."""

    def notes(*sets, case="default"):
        (tmp_path / "notes.yaml").write_text(yaml.safe_dump({"extraObjects": [NOTES]}))
        files = [f"--values={chart}/ci/{case}-values.yaml", f"--values={tmp_path}/notes.yaml"]
        done = call_helm("template", "speech", str(chart), "--namespace=asr", *files, *(f"--set={s}" for s in sets))
        assert done.returncode == 0, done.stderr
        found = (m for m in yaml.safe_load_all(done.stdout) if m and m["metadata"]["name"] == "notes")
        return next(found)["data"]["notes"]

    return notes


def test_notes_of_every_case_are_whole(case, notes):
    text = notes(case=case)
    assert "port-forward service/" in text
    assert "helm test speech --namespace asr" in text
    assert not any(flaw in text for flaw in ("<no value>", "%!", "map[", "\n\n\n"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((), "carnelian-transcribe recording.wav --model quartznet_demo --url localhost:8001\n"),
        (("tls.secretName=t",), "--url localhost:8001 --ca ca.crt\n"),
        (("tls.secretName=t",), "has to name speech-carnelian.asr.svc"),
        (("tls.secretName=t", "tls.mutual=true"), "--ca ca.crt --cert client.crt --key client.key\n"),
        (("ingress.grpc.enabled=true", "ingress.grpc.host=a.example.com"), "--url a.example.com:443 --tls"),
        (("ingress.grpc.enabled=true", "ingress.grpc.host=*.example.com"), "--url NAME.example.com:443 --tls"),
        (
            ("gateway.parentRefs[0].name=a", "gateway.grpc.enabled=true", "gateway.grpc.hostnames={*.example.com}"),
            "--url NAME.example.com:443 --tls",
        ),
        (("service.type=LoadBalancer",), "get service speech-carnelian\n"),
        (("autoscaling.mode=hpa",), "jsonpath='{.data.rules\\.yaml}'"),
        (("autoscaling.mode=hpa",), "nothing here scrapes"),
        (("autoscaling.mode=keda", "autoscaling.minReplicas=0", "autoscaling.keda.activationQuery=x"), "may be no pod"),
        (("networkPolicy.enabled=true",), "networkPolicy.scrapers"),
    ],
)
def test_notes_say_what_the_values_ask_for(values, says, notes):
    assert says in notes(*values)


def test_notes_do_not_warn_of_what_is_there(notes):
    text = notes("monitoring.serviceMonitor.enabled=true", "autoscaling.mode=hpa")
    assert "nothing here scrapes" not in text
    assert "From outside" not in text

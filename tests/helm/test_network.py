"""What is open to whom: Services, Ingress, Gateway API, NetworkPolicy, TLS, restricted protocols."""

import base64
import hashlib
from typing import Any

import pytest

LOAD = "model.load={quartznet_demo}"


def is_hook(manifest: dict[str, Any]) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def test_the_headless_service_resolves_to_ready_pods(render):
    spec = render().one("Service", "-headless")["spec"]
    assert spec["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in spec
    assert [port["port"] for port in spec["ports"]] == [8001]
    assert len(render(case="download").all("Service")) == 2


def test_services_say_whether_grpc_is_encrypted(render):
    """A mesh takes a port called grpc for one in the clear."""

    def protocols(*values):
        rendered = render(*values)
        return [rendered.one("Service", n)["spec"]["ports"][0].get("appProtocol") for n in ("carnelian", "-headless")]

    assert protocols() == ["kubernetes.io/h2c"] * 2
    assert protocols("tls.secretName=tls") == ["https"] * 2
    # By https Azure's load balancer would choose a health probe that no pod answers.
    assert protocols("tls.secretName=tls", "service.type=LoadBalancer") == [None, "https"]


def test_clients_can_be_kept_with_one_pod(render):
    assert render(case="download").one("Service", "carnelian")["spec"]["sessionAffinity"] == "ClientIP"


def test_a_load_balancer_lets_in_what_it_is_told(render):
    rendered = render(case="closed")
    policy = rendered.one("NetworkPolicy", "carnelian")["spec"]
    spec = rendered.one("Service", "carnelian")["spec"]
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert spec["loadBalancerClass"] == "service.k8s.aws/nlb"
    assert spec["externalTrafficPolicy"] == "Local"
    # The policy sees the same addresses.
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in policy["ingress"][0]["from"]


def test_services_of_clients_have_the_addresses_that_they_are_told(render):
    rendered = render(case="closed")
    for name in ("carnelian", "-headless"):
        spec = rendered.one("Service", name)["spec"]
        assert spec["ipFamilyPolicy"] == "PreferDualStack"
        assert spec["ipFamilies"] == ["IPv6", "IPv4"]
    default = render().one("Service", "carnelian")["spec"]
    assert not {"ipFamilies", "ipFamilyPolicy", "loadBalancerClass", "externalTrafficPolicy"} & set(default)


def test_a_cluster_without_ipv6_may_be_asked_for_it(render):
    assert render("service.ipFamilyPolicy=PreferDualStack").one("Service", "carnelian")
    assert render("service.ipFamilies={IPv4}", "service.ipFamilyPolicy=SingleStack").one("Service", "carnelian")


def test_http_need_not_be_exposed(render):
    rendered = render(case="closed")
    assert [port["name"] for port in rendered.one("Service", "carnelian")["spec"]["ports"]] == ["grpc"]
    policy = rendered.one("NetworkPolicy", "carnelian")["spec"]
    assert policy["ingress"][0]["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    assert rendered.server["readinessProbe"]["httpGet"]["port"] == "http"  # of the pod, which the kubelet asks


def test_tls_comes_from_a_secret(render):
    rendered = render("tls.secretName=speech-tls")
    args = rendered.server["args"]
    assert {"--grpc-use-ssl=true", "--grpc-server-cert=/tls/tls.crt", "--grpc-server-key=/tls/tls.key"} <= set(args)
    assert "--grpc-use-ssl-mutual=true" not in args
    volume = next(volume for volume in rendered.pod["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == "speech-tls"
    assert volume["secret"]["defaultMode"] == 0o440
    assert [item["key"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key"]


def test_mutual_tls_asks_clients_for_a_certificate(render):
    rendered = render(case="bucket")
    assert {"--grpc-use-ssl-mutual=true", "--grpc-root-cert=/tls/ca.crt"} <= set(rendered.server["args"])
    volume = next(volume for volume in rendered.pod["volumes"] if volume["name"] == "tls")
    # A Secret without authorities makes no pod that gets ready and refuses everybody.
    assert [item["key"] for item in volume["secret"]["items"]] == ["tls.crt", "tls.key", "ca.crt"]


@pytest.mark.parametrize("runtime", ["wheel", "native"])
def test_protocols_are_restricted_by_default(runtime, render):
    args = render(f"runtime={runtime}").server["args"]
    closed = "model-repository,shared-memory,trace,logging:carnelian-admin-key=$(CARNELIAN_ADMIN_KEY)"
    assert f"--grpc-restricted-protocol={closed}" in args
    assert f"--http-restricted-api={closed}" in args


def test_the_key_is_in_no_argument(render):
    rendered = render("restrictedProtocols.key=0123456789abcdef")
    assert "0123456789abcdef" not in str(rendered.one("Deployment"))
    assert base64.b64decode(rendered.one("Secret")["data"]["key"]) == b"0123456789abcdef"


def test_a_key_is_made_up(render):
    key = base64.b64decode(render().one("Secret")["data"]["key"])
    assert len(key) == 40
    reference = next(e for e in render().server["env"] if e["name"] == "CARNELIAN_ADMIN_KEY")["valueFrom"]
    assert reference == {"secretKeyRef": {"name": "speech-eu-carnelian-admin", "key": "key"}}


def test_an_existing_secret_is_used(render):
    rendered = render(case="bucket")
    assert rendered.all("Secret") == []
    reference = next(e for e in rendered.server["env"] if e["name"] == "CARNELIAN_ADMIN_KEY")["valueFrom"]
    assert reference["secretKeyRef"]["name"] == "speech-admin"


def test_a_new_key_restarts_the_pods(render):
    def annotations(key):
        rendered = render(f"restrictedProtocols.key={key}")
        return rendered.one("Deployment")["spec"]["template"]["metadata"]["annotations"]

    assert annotations("a" * 16)["checksum/admin-key"] != annotations("b" * 16)["checksum/admin-key"]
    assert annotations("a" * 16) == annotations("a" * 16)


def test_pods_show_no_hash_by_which_a_key_is_guessed_fast(render):
    pod = render(f"restrictedProtocols.key={'a' * 16}").one("Deployment")["spec"]["template"]
    assert hashlib.sha256(b"a" * 16).hexdigest() not in str(pod)


def test_protocols_can_be_opened(render):
    rendered = render("restrictedProtocols.enabled=false")
    assert not any("restricted" in argument for argument in rendered.server["args"])
    assert rendered.all("Secret") == []
    # carnelian-serve lets nobody load further models, whatever is open.
    assert "--model=quartznet_demo" in render("restrictedProtocols.enabled=false", LOAD).server["args"]


def test_ingresses_are_one_for_each_protocol(render):
    rendered = render(case="download")
    grpc, http = rendered.one("Ingress", "-grpc"), rendered.one("Ingress", "-http")
    assert grpc["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "GRPC"
    assert "nginx.ingress.kubernetes.io/backend-protocol" not in http["metadata"]["annotations"]
    paths = grpc["spec"]["rules"][0]["http"]["paths"]
    assert [path["path"] for path in paths] == ["/inference.GRPCInferenceService", "/grpc.health.v1.Health"]
    for path in paths:
        assert path["backend"]["service"] == {"name": "speech-eu-carnelian", "port": {"name": "grpc"}}
    assert grpc["spec"]["tls"] == [{"hosts": ["speech.example.com"], "secretName": "speech-tls"}]


def test_the_http_ingress_lets_no_repository_control_through(render):
    paths = render(case="download").one("Ingress", "-http")["spec"]["rules"][0]["http"]["paths"]
    assert [path["path"] for path in paths] == ["/v2/models", "/v2/health"]


def test_gateway_routes_lead_to_the_service_under_host_names_of_their_own(render):
    rendered = render(case="google")
    grpc, http = rendered.one("GRPCRoute")["spec"], rendered.one("HTTPRoute")["spec"]
    assert rendered.one("GRPCRoute")["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert grpc["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    services = ["inference.GRPCInferenceService", "grpc.health.v1.Health"]
    assert grpc["rules"][0]["matches"] == [{"method": {"service": service}} for service in services]
    assert grpc["rules"][0]["backendRefs"] == [{"name": "speech-eu-carnelian", "port": 8001}]
    assert http["rules"][0]["matches"][0] == {"path": {"type": "PathPrefix", "value": "/v2/models"}}
    assert http["rules"][0]["backendRefs"] == [{"name": "speech-eu-carnelian", "port": 8000}]
    # A Gateway accepts one kind of route for a host name.
    assert not set(grpc["hostnames"]) & set(http["hostnames"])


@pytest.mark.parametrize(
    ("grpc", "http"),
    [
        ("speech.example.com", "speech.example.com"),
        ("*.example.com", "api.speech.example.com"),
        ("speech.example.com", "*.example.com"),
        ("*.example.com", "*.speech.example.com"),
        ("*.speech.example.com", "*.example.com"),
    ],
)
def test_routes_with_a_common_host_name_are_refused(grpc, http, refusal):
    names = (f"gateway.grpc.hostnames[0]={grpc}", f"gateway.http.hostnames[0]={http}")
    assert "give each its own" in refusal(*names, case="google")


@pytest.mark.parametrize("http", ["speech.example.com", "*.speech.example.org", "*.a-speech.example.com"])
def test_a_wildcard_is_of_the_names_below_it_alone(http, render):
    names = ("gateway.grpc.hostnames[0]=*.speech.example.com", f"gateway.http.hostnames[0]={http}")
    assert render(*names, case="google").one("HTTPRoute")["spec"]["hostnames"] == [http]


def test_routes_and_policies_are_off_by_default(render):
    kinds = {manifest["kind"] for manifest in render().manifests if not is_hook(manifest)}
    assert kinds == {"Deployment", "PodDisruptionBudget", "Secret", "Service", "ServiceAccount"}


def test_the_policy_lets_nothing_out(render):
    spec = render(case="closed").one("NetworkPolicy", "carnelian")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []


def test_the_policy_lets_fetching_out(render):
    egress = render(case="bucket").one("NetworkPolicy", "carnelian")["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [53, 53, 5353, 5353, 443]
    more = render(case="download").one("NetworkPolicy", "carnelian")["spec"]["egress"]
    assert [port["port"] for port in more[0]["ports"]] == [53, 53, 5353, 5353, 8444]
    assert more[-1] == {"ports": [{"port": 8443, "protocol": "TCP"}]}


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("s3://speech/releases/1", 443),
        ("s3://https://minio.speech:9000/speech/1", 9000),
        ("s3://https://[fd00::1]:9000/speech/1", 9000),
        ("s3://https://[fd00::1]/speech/1", 443),
        ("s3://10.0.0.7:9000/speech", 9000),
        ("s3://http://minio.speech/speech/1", 80),
        ("gs://speech/release:2", 443),
    ],
)
def test_the_policy_lets_out_to_the_port_of_the_address(url, port, render):
    values = ("runtime=native", "networkPolicy.enabled=true", "modelRepository.source=bucket")
    egress = render(*values, f"modelRepository.bucket.url={url}").one("NetworkPolicy", "carnelian")["spec"]["egress"]
    assert egress[0]["ports"][-1] == {"port": port, "protocol": "TCP"}


def test_metrics_are_private_to_the_namespace_or_to_scrapers(render):
    own = render(case="closed").one("NetworkPolicy", "carnelian")["spec"]["ingress"][1]
    assert own == {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": [{"podSelector": {}}]}
    given = render(case="bucket").one("NetworkPolicy", "carnelian")["spec"]["ingress"][1]["from"]
    assert given == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_the_policy_lets_clients_in(render):
    everybody = render("networkPolicy.enabled=true").one("NetworkPolicy", "carnelian")["spec"]["ingress"][0]
    assert [port["port"] for port in everybody["ports"]] == ["grpc", "http"]
    assert "from" not in everybody
    some = render(case="closed").one("NetworkPolicy", "carnelian")["spec"]["ingress"][0]["from"]
    assert some[0] == {"podSelector": {"matchLabels": {"app": "caller"}}}
    own = some[-1]["podSelector"]["matchLabels"].items()
    assert own <= render(case="closed").one("Pod")["metadata"]["labels"].items()


def test_the_policy_lets_a_mesh_in(render):
    rules = render("networkPolicy.ingress[0].ports[0].port=4143", case="closed").one("NetworkPolicy", "carnelian")
    assert rules["spec"]["ingress"][2:] == [{"ports": [{"port": 4143}]}]


def test_the_chart_s_own_callers_reach_the_server_where_nothing_is_let_out(render):
    rendered = render("networkPolicy.egress[0].ports[0].port=8443", case="jobs")
    spec = rendered.one("NetworkPolicy", "-test-and-perf")["spec"]
    assert (spec["policyTypes"], spec["ingress"]) == (["Ingress", "Egress"], [])
    (expression,) = spec["podSelector"].pop("matchExpressions")
    assert (expression["key"], expression["operator"]) == ("app.kubernetes.io/component", "In")
    callers = [rendered.one("Job", "-sweep")["spec"]["template"], rendered.one("Pod")]
    others = [rendered.one("Job", "-quartznet")["spec"]["template"], rendered.one("Deployment")["spec"]["template"]]
    selected = [pod["metadata"]["labels"][expression["key"]] in expression["values"] for pod in (*callers, *others)]
    assert selected == [True, True, False, False]
    for pod in callers:
        assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    server, dns, given = spec["egress"]
    assert server == {"to": [{"podSelector": rendered.one("Deployment")["spec"]["selector"]}]}
    assert [port["port"] for port in dns["ports"]] == [53, 53, 5353, 5353]
    assert given == {"ports": [{"port": 8443}]}


def test_none_but_the_run_s_own_pods_reach_training_pods(render):
    """torchrun unpickles what it is sent: whoever reaches it runs code."""
    rendered = render("networkPolicy.egress[0].ports[0].port=8443", case="jobs")
    spec = rendered.one("NetworkPolicy", "-quartznet")["spec"]
    run = rendered.one("Job", "-quartznet")["spec"]["template"]["metadata"]["labels"]
    own = spec["podSelector"]["matchLabels"]
    assert own.items() <= run.items()
    assert (own["carnelian.dev/run"], own["app.kubernetes.io/instance"]) == ("quartznet", "speech-eu")
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    peers = [{"podSelector": {"matchLabels": own}}]
    assert spec["ingress"] == [{"from": peers}]  # on any port, as NCCL and gloo choose them
    pods, dns, given = spec["egress"]
    assert pods == {"to": peers}
    assert [port["port"] for port in dns["ports"]] == [53, 53, 5353, 5353]  # the rendezvous has a name
    assert given == {"ports": [{"port": 8443}]}
    assert render("networkPolicy.enabled=false", case="jobs").all("NetworkPolicy") == []


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (("tls.mutual=true",), "name the Secret"),
        (("restrictedProtocols.key=aaaaaaaaaaaaaaaa", "restrictedProtocols.existingSecret=s"), "choose one"),
        (("restrictedProtocols.closed=null",), "restrictedProtocols.closed is empty"),
        (("runtime=native", LOAD, "restrictedProtocols.enabled=false"), "close it, or leave model.load empty"),
        (("runtime=native", LOAD, "restrictedProtocols.closed={logging}"), "close it, or leave model.load empty"),
        (("restrictedProtocols.key=short",), "restrictedProtocols"),
        (("restrictedProtocols.closed={models}",), "restrictedProtocols"),
        (("ingress.grpc.enabled=true",), "ingress.grpc.host is empty"),
        (("gateway.http.enabled=true",), "name a Gateway"),
        (("ingress.http.host=-x",), "ingress"),
        (("service.loadBalancerSourceRanges={10.0.0.0/8}",), "use networkPolicy.clients"),
        (("service.loadBalancerClass=a/b",), "set it to LoadBalancer"),
        (("service.externalTrafficPolicy=Local",), "set NodePort or LoadBalancer"),
        (("service.ipFamilies={IPv4,IPv6}",), "set PreferDualStack or RequireDualStack"),
        (("service.ipFamilies={IPv4,IPv6}", "service.ipFamilyPolicy=SingleStack"), "set PreferDualStack or"),
        (("service.ipFamilies={IPv6}",), "server.host is 0.0.0.0, where pods do not listen on it; set"),
        (("service.ipFamilyPolicy=RequireDualStack",), 'set server.host: "::"'),
        (
            ("gateway.parentRefs[0].name=a", "gateway.http.enabled=true", "gateway.grpc.enabled=true"),
            "give each its own",
        ),
        (("ingress.http.enabled=true", "ingress.http.host=a.b", "service.exposeHttp=false"), "set it true"),
    ],
)
def test_what_cannot_work_is_refused(values, advice, refusal):
    assert advice in refusal(*values)

"""The manifests of deploy/kubernetes: valid for the schemas of Kubernetes, and true of the server.

`kubectl kustomize` renders them where kubectl or kustomize is installed. Nothing is applied to a cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from prefixwise.cli.serve import SERVER_FLAGS
from prefixwise.cluster.options import ClusterOptions
from prefixwise.engine.admission import DEFAULT_MAX_QUEUED_TOKENS
from prefixwise.forward.backend import DeviceKind
from prefixwise.server.openapi_operations import OPERATIONS
from tests.deploy import DEPLOY, DRAIN_SECONDS, arguments_of, read_documents, read_yaml, serve_parameters, yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("base", "cuda", "tpu")
KINDS = {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ServiceMonitor"}
VERSIONS = ("1.30", "1.34")  # the first that has all that we use, and a later one
TAGS = {"base": "cpu", "cuda": "cuda", "tpu": "tpu"}
DEVICE_KINDS: dict[str, DeviceKind] = {"base": "cpu", "cuda": "gpu", "tpu": "tpu"}
ADAPTER = DEPLOY / "monitoring" / "prometheus-adapter.yaml"
QUANTITIES = {"k": 1_000, "M": 1_000_000}

Manifest = dict[str, Any]


def closed(properties: Mapping[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


# The fields that we use of custom resources, as their definitions name them (v1 of both).
STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
GROUP = {"rayStartParams": {"type": "object", "additionalProperties": STRING}, "template": {"type": "object"}}
WORKERS = {**GROUP, "groupName": STRING, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
CUSTOM = {
    ("ray.io/v1", "RayService"): closed(
        {
            "serveConfigV2": STRING,
            "rayClusterConfig": closed(
                {
                    "rayVersion": STRING,
                    "enableInTreeAutoscaling": {"type": "boolean"},
                    "headGroupSpec": closed(GROUP, ("template",)),
                    "workerGroupSpecs": {"type": "array", "items": closed(WORKERS, ("groupName", "template"))},
                },
                ("headGroupSpec",),
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        {
            "selector": {"type": "object"},
            "endpoints": {
                "type": "array",
                "items": closed(
                    {
                        "port": STRING,
                        "path": STRING,
                        "interval": {"type": "string", "pattern": r"^\d+s$"},
                        "authorization": closed({"credentials": closed({"name": STRING, "key": STRING}, ("key",))}),
                    }
                ),
            },
        },
        ("endpoints", "selector"),
    ),
}


@cache
def rendered(overlay: str) -> str:
    """What `kubectl apply --kustomize` would send. The base can also be read as it is written."""
    for command in (("kubectl", "kustomize"), ("kustomize", "build")):
        if shutil.which(command[0]) is not None:
            ran = subprocess.run([*command, KUBERNETES / overlay], capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout
    if overlay != "base":
        pytest.skip("neither kubectl nor kustomize is installed")
    base = read_yaml(KUBERNETES / "base" / "kustomization.yaml")
    text = "\n---\n".join((KUBERNETES / "base" / name).read_text("utf-8") for name in base["resources"])
    for image in base["images"]:
        text = re.sub(rf"image: {image['name']}$", f"image: {image['newName']}:{image['newTag']}", text, flags=re.M)
    return text


def manifests(overlay: str) -> dict[str, Manifest]:
    """By kind: each has one."""
    documents = read_documents(rendered(overlay))
    found = {each["kind"]: each for each in documents}
    assert len(found) == len(documents)
    return found


def check_schema(manifest: Manifest, version: str) -> None:
    """Raises jsonschema's ValidationError (or its subclass) if a field is unknown, missing or of another type."""
    import jsonschema

    custom = CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    if custom is None:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest["spec"], custom)
    for template in pod_templates(manifest):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": manifest["metadata"], "template": template},
            version,
            strict=True,
        )


def pod_templates(manifest: Manifest) -> Iterator[Manifest]:
    cluster = manifest["spec"].get("rayClusterConfig", {})
    groups = [cluster[name] for name in ("headGroupSpec",) if name in cluster]
    yield from (group["template"] for group in (*groups, *cluster.get("workerGroupSpecs", ())))


def container(template: Manifest) -> Manifest:
    (found,) = template["spec"]["containers"]
    return dict(found)


def server(overlay: str) -> Manifest:
    return container(manifests(overlay)["Deployment"]["spec"]["template"])


def ray_service() -> Manifest:
    return dict(read_yaml(KUBERNETES / "rayservice.yaml"))


def quantity(text: str) -> int:
    return int(text[:-1]) * QUANTITIES[text[-1]]


class TestSchemas:
    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_every_manifest_is_valid(self, overlay: str) -> None:
        found = manifests(overlay)
        assert set(found) == KINDS
        for manifest in found.values():
            for version in VERSIONS if overlay == "base" else VERSIONS[:1]:
                check_schema(manifest, version)

    def test_the_ray_service_is_valid(self) -> None:
        check_schema(ray_service(), VERSIONS[0])

    @pytest.mark.parametrize("kind", ["Deployment", "ServiceMonitor", "HorizontalPodAutoscaler", "RayService"])
    def test_a_wrong_manifest_is_not(self, kind: str) -> None:
        wrong = deepcopy(ray_service() if kind == "RayService" else manifests("base")[kind])
        wrong["spec"]["nonsense"] = 1
        with pytest.raises(Exception, match="nonsense"):
            check_schema(wrong, VERSIONS[-1])

    def test_a_wrong_pod_of_the_ray_service_is_not(self) -> None:
        wrong = deepcopy(ray_service())
        container(wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"])["ports"][0]["containerPort"] = "6379"
        with pytest.raises(Exception, match="6379"):
            check_schema(wrong, VERSIONS[-1])


@pytest.mark.parametrize("overlay", OVERLAYS)
class TestServer:
    def test_options_port_probes_and_key_are_the_servers(self, overlay: str) -> None:
        found = server(overlay)
        parameters = serve_parameters(found["args"])
        (port,) = found["ports"]
        assert port["containerPort"] == parameters["port"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert found[name]["httpGet"] == {"path": "/health", "port": port["name"]}
        assert "/health" in {operation.path for operation in OPERATIONS}
        (variable,) = found["env"]
        assert variable["name"] in {flag.environment_variable for flag in SERVER_FLAGS.values()}

    def test_the_server_has_the_time_it_needs(self, overlay: str) -> None:
        found = server(overlay)
        parameters = serve_parameters(found["args"])
        pod = manifests(overlay)["Deployment"]["spec"]["template"]["spec"]
        before = found["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= before + parameters["shutdown_grace"] + DRAIN_SECONDS
        liveness = found["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] > parameters["watchdog_timeout"]

    def test_the_pod_is_the_hardened_image(self, overlay: str) -> None:
        found = server(overlay)
        pod = manifests(overlay)["Deployment"]["spec"]["template"]["spec"]
        assert found["image"].rpartition(":")[2] == TAGS[overlay]
        check_hardened(pod, found)

    def test_the_objects_find_each_other(self, overlay: str) -> None:
        found = manifests(overlay)
        labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
        assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
        assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
        service = found["Service"]
        assert service["spec"]["selector"].items() <= labels
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] == server(overlay)["ports"][0]["name"]
        monitor = found["ServiceMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        (endpoint,) = monitor["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
        assert endpoint["authorization"]["credentials"] == server(overlay)["env"][0]["valueFrom"]["secretKeyRef"]

    def test_replicas_follow_queued_tokens(self, overlay: str) -> None:
        found = manifests(overlay)
        scaling = found["HorizontalPodAutoscaler"]["spec"]
        target = {key: found["Deployment"][key] for key in ("apiVersion", "kind")}
        assert scaling["scaleTargetRef"] == {**target, "name": found["Deployment"]["metadata"]["name"]}
        assert "replicas" not in found["Deployment"]["spec"]
        (metric,) = scaling["metrics"]
        (rule,) = read_yaml(ADAPTER)["rules"]["custom"]
        assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
        # Replicas are added before requests are refused.
        average = quantity(metric["pods"]["target"]["averageValue"])
        assert average <= DEFAULT_MAX_QUEUED_TOKENS[DEVICE_KINDS[overlay]] / 2


def check_hardened(pod: Manifest, found: Manifest) -> None:
    (user,) = arguments_of("runtime", "USER")
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (volumes,) = arguments_of("runtime", "VOLUME")
    assert {each["mountPath"] for each in found["volumeMounts"]} == {*json.loads(volumes), "/tmp"}
    assert {each["name"] for each in found["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


class TestRayService:
    def configuration(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(ray_service()["spec"]["serveConfigV2"])
        return found

    def test_the_serve_configuration_is_that_of_the_command_line(self) -> None:
        pytest.importorskip("ray")
        from prefixwise.cluster.serve_app import serve_configuration

        found = self.configuration()
        (application,) = found["applications"]
        assert serve_configuration(ClusterOptions.from_json(application["args"])) == found

    @pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")  # Ray's
    def test_ray_accepts_it_imports_it_and_builds_it(self) -> None:
        pytest.importorskip("ray")
        from ray import serve
        from ray._common.utils import import_attr
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(self.configuration())
        (application,) = schema.applications
        built = import_attr(application.import_path)(application.args)
        assert isinstance(built, serve.Application)

    def test_pods_are_the_hardened_image_with_probes_that_need_no_program(self) -> None:
        pytest.importorskip("ray")
        from prefixwise.cluster.connection import PROXY_ENVIRONMENT

        cluster = ray_service()["spec"]["rayClusterConfig"]
        options = self.configuration()["http_options"]
        for template in pod_templates(ray_service()):
            found = container(template)
            check_hardened(template["spec"], found)
            assert {"name": "serve", "containerPort": options["port"]} in found["ports"]
            assert all("httpGet" in found[name] for name in ("livenessProbe", "readinessProbe"))
            key, *others = found["env"]
            assert [key] == server("base")["env"]
            assert {each["name"]: each["value"] for each in others} == PROXY_ENVIRONMENT
        (workers,) = cluster["workerGroupSpecs"]
        scale = self.configuration()["applications"][0]["args"]["scale"]
        limits = container(workers["template"])["resources"]["limits"]
        # Every replica that Serve may ask for finds its GPU.
        gpus = workers["maxReplicas"] * int(limits["nvidia.com/gpu"])
        assert gpus >= scale["max_replicas"] * scale["gpus_per_replica"]

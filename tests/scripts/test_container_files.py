"""Dockerfile and docker-compose.yml: they refer to what exists, use a safe base image, and publish on loopback only."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_options import build_parser

ROOT = Path(__file__).parents[2]
HEALTH_URL = "http://127.0.0.1:8000/v2/health/ready"
FIRST_SAFE_RELEASE = (25, 7)


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile as (name, rest), continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def rest_of(instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile() if name == instruction]


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_everything_copied_exists_and_is_not_ignored() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    copied = [source for rest in rest_of("COPY") for source in rest.split()[:-1]]
    assert {"backend_engine", "model_repository", "templates", "scripts", "constraints.txt"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] not in ignored


def test_the_base_image_is_new_enough() -> None:
    image = next(rest for rest in rest_of("ARG") if rest.startswith("TRITON_IMAGE="))
    match = re.fullmatch(r"TRITON_IMAGE=nvcr\.io/nvidia/tritonserver:(\d+)\.(\d+)-py3", image)
    assert match is not None, image
    assert (int(match[1]), int(match[2])) >= FIRST_SAFE_RELEASE
    assert rest_of("FROM") == ["${TRITON_IMAGE}"]


def test_the_container_runs_serve_with_flags_it_knows_as_a_plain_user() -> None:
    (entrypoint,) = rest_of("ENTRYPOINT")
    command = yaml.safe_load(entrypoint)
    assert command[:3] == ["tini", "--", "scripts/serve.sh"]
    arguments = build_parser().parse_args(command[3:])
    assert (arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port) == (
        "0.0.0.0",
        8000,
        8001,
        8002,
    )
    assert rest_of("EXPOSE") == ["8000 8001 8002"]
    assert rest_of("USER") == ["inflight"]
    assert HEALTH_URL in rest_of("HEALTHCHECK")[0]


def test_set_up_finds_all_it_reads_before_the_code_is_copied() -> None:
    before = dockerfile()[: dockerfile().index(("RUN", "scripts/setup.sh"))]
    copied = {source for name, rest in before if name == "COPY" for source in rest.split()[:-1]}
    read = set(re.findall(r"requirements[\w-]*\.txt|constraints\.txt", (ROOT / "scripts/setup.sh").read_text()))
    assert read <= copied
    assert {path.name for path in ROOT.glob("requirements*.txt")} <= copied


def servers(compose: dict[str, Any]) -> list[dict[str, Any]]:
    return [service for name, service in compose["services"].items() if name.startswith("inflight")]


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["ports"] and all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    assert len(servers(compose)) == 2
    for service in servers(compose):
        assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002)]


def test_compose_checks_readiness_and_leaves_time_to_stop(compose: dict[str, Any]) -> None:
    for service in servers(compose):
        assert HEALTH_URL in service["healthcheck"]["test"][-1]
        assert int(service["stop_grace_period"].rstrip("s")) > 10
        assert service["shm_size"] == "1gb"


def test_compose_builds_both_devices_from_the_dockerfile(compose: dict[str, Any]) -> None:
    services = compose["services"]
    arguments = {rest.partition("=")[0] for rest in rest_of("ARG")}
    for service, device in ((services["inflight"], "cpu"), (services["inflight-gpu"], "cuda")):
        assert (ROOT / service["build"]["context"] / "Dockerfile").is_file()
        assert service["build"]["args"] == {"DEVICE": device}
        assert set(service["build"]["args"]) <= arguments
        assert service["image"] == f"inflight:{device}"
    assert "profiles" not in services["inflight"]
    assert services["inflight-gpu"]["profiles"] == ["gpu"]
    (device_request,) = services["inflight-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device_request["capabilities"] == ["gpu"]
    (volume,) = services["inflight"]["volumes"]
    assert volume.split(":")[0] in compose["volumes"]
    assert volume.split(":")[1] in rest_of("VOLUME")

"""Health of the container: exit status 0 while the verifier's engine runs. HOST:PORT of its probe port."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7076"
with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
    request = health_pb2.HealthCheckRequest(service="live")
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=4)
    except grpc.RpcError as error:
        sys.exit(f"no answer from {address}: {error.code().name}")
sys.exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else "the engine has stopped")

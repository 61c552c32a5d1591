"""OpenTelemetry: one span a request, sent where `--otlp-traces-endpoint` says. Needs the extra `otel`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from kitfox.errors import ConfigError
from kitfox.server.logs import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}


def check_installed() -> None:
    """Raises ConfigError where the packages of the extra are missing."""
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        found = found and importlib.util.find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'kitfox[otel]'", param="otlp_traces_endpoint"
        )


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans as protobuf over HTTP; the environment's OTEL_EXPORTER_OTLP_* hold for what is not the URL."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


class RequestSpans:
    """Makes a span of a request once it has ended: nothing happens while it runs. A thread sends them, in batches.

    Attributes:
        enabled: may change at any time.
    """

    def __init__(self, exporter: SpanExporter):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.enabled = True
        resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "kitfox"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kitfox")
        self._propagator = TraceContextTextMapPropagator()

    def write(self, record: RequestRecord) -> None:
        """Its span is a child of the client's, where the request came with a traceparent header."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if record.is_probe or not self.enabled:
            return
        parent = self._propagator.extract({"traceparent": record.traceparent} if record.traceparent else {})
        operation = OPERATIONS.get(record.route or "")
        model = record.job.model if record.job is not None else ""
        span = self._tracer.start_span(
            f"{operation} {model}" if operation and model else f"{record.method} {record.route or '(no route)'}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=record.start_unix_ns,
            attributes={name: value for name, value in _attributes(record, operation).items() if value is not None},
        )
        if record.status >= 500 or "error" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.start_unix_ns + round(record.duration_s * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, operation: str | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "kitfox.request_id": record.request_id,
    }
    job = record.job
    if job is None:
        return attributes
    return attributes | {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kitfox",
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": job.sampling.max_tokens,
        "gen_ai.request.temperature": job.sampling.temperature,
        "gen_ai.request.top_p": job.sampling.top_p,
        "gen_ai.request.choice.count": job.sampling.n * len(job.prompts),
        "gen_ai.request.seed": job.sampling.seed,
        "gen_ai.response.id": job.answer_id,
        "gen_ai.response.model": job.model,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_in_model_prefill": record.prefill_s,
        "gen_ai.latency.time_in_model_decode": record.decode_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.e2e": record.duration_s,
    }

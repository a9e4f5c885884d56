"""Transports move tensors between ranks. They know nothing of attention or plans."""

from ringspan.transports.calls import CallDescription, CallPair
from ringspan.transports.flight_record import FlightRecord, flight_record
from ringspan.transports.handshake import (
    RankSignature,
    check_agreement,
    digest_as_int64,
    first_disagreement,
    int64_as_digest,
    report_refusal,
)
from ringspan.transports.in_process import InProcessTransport
from ringspan.transports.process_group import ProcessGroupTransport, as_transport
from ringspan.transports.requests import PostExchange, RankGenerator, Traffic, WaitExchange

__all__ = [
    "CallDescription",
    "CallPair",
    "FlightRecord",
    "InProcessTransport",
    "PostExchange",
    "ProcessGroupTransport",
    "RankGenerator",
    "RankSignature",
    "Traffic",
    "WaitExchange",
    "as_transport",
    "check_agreement",
    "digest_as_int64",
    "first_disagreement",
    "flight_record",
    "int64_as_digest",
    "report_refusal",
]

"""From a trace to a certificate, and the proofs that such traces are right."""

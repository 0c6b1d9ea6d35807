"""One file a thread or script of the queue's side: intake, sweeper, gate, publisher, keeper, canceller, quarantine."""

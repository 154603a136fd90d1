"""Everything that knows Ray, HTTP or gRPC: many Orca engines behind one door."""

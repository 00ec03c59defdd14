"""Links between edge and cloud: profiles, capacity traces, four ways to realise them, their calibration."""

"""Start runs and read their folders and logs; shared by bench, doctor, report and tune."""

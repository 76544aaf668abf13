"""What a run tells: tables and pictures, read from run folders alone."""

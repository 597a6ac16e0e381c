"""What a target lacks, found before anything runs."""

"""What tests and benchmarks of programs that use Penstock need."""

"""Generated from proto/outrider/common/pb/outrider.proto by `make proto`; do not edit."""
